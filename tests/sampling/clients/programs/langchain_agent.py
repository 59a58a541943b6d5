"""LangChain: its stock agent."""

import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from world import FOLLOW_UPS, INSTRUCTIONS, SCREEN, TASK, chat_result


@tool
def click(x: float, y: float) -> str:
    """Click."""
    return f"clicked {x} {y}"


@tool
def type_text(text: str) -> str:
    """Type."""
    return "typed"


@tool
def screenshot() -> list[Any]:
    """Look."""
    return chat_result("screenshot")


api = sys.argv[1]
model = ChatOpenAI(
    model="policy",
    max_retries=0,
    use_responses_api=api.startswith("responses"),
    use_previous_response_id=api.endswith("previous"),
    streaming=api.endswith("stream"),
)
agent: Any = create_agent(model, [click, type_text, screenshot], system_prompt=INSTRUCTIONS)
image = {"type": "image_url", "image_url": {"url": SCREEN}}
messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK}, image]}]
for said in (*FOLLOW_UPS, None):
    messages = agent.invoke({"messages": messages}, {"recursion_limit": 50})["messages"]
    if said:
        messages = [*messages, {"role": "user", "content": said}]
