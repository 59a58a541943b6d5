"""pydantic-ai: its agent."""

import asyncio
import base64
import sys
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from world import FOLLOW_UPS, INSTRUCTIONS, SCREEN, TASK

api = sys.argv[1]
image = BinaryContent(base64.b64decode(SCREEN.partition(",")[2]), media_type="image/png")
model: Any = OpenAIChatModel("policy") if api.startswith("chat") else OpenAIResponsesModel("policy")
settings: Any = {"openai_previous_response_id": "auto"} if api.endswith("previous") else {}
agent: Any = Agent(model, instructions=INSTRUCTIONS, model_settings=settings)


@agent.tool_plain
def click(x: float, y: float) -> str:
    """Click."""
    return "ok"


@agent.tool_plain
def type_text(text: str) -> str:
    """Type."""
    return "typed"


@agent.tool_plain
def screenshot() -> BinaryContent:
    """Look."""
    return image


async def read_events(context: object, events: AsyncIterable[object]) -> None:
    """With a reader of events, the agent streams."""
    async for _ in events:
        pass


async def main() -> None:
    """A run for each message of the user."""
    streaming = {"event_stream_handler": read_events} if api.endswith("stream") else {}
    result = await agent.run([TASK, image], **streaming)
    for said in FOLLOW_UPS:
        result = await agent.run(said, message_history=result.all_messages(), **streaming)


asyncio.run(main())
