"""litellm: a loop over its functions for Chat Completions, Responses and Anthropic's Messages."""

import asyncio
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download of prices
import litellm
from world import (
    FOLLOW_UPS,
    FUNCTIONS,
    INSTRUCTIONS,
    SCREEN,
    TASK,
    chat_question,
    chat_result,
    chat_tools,
    responses_question,
    responses_result,
    responses_tools,
)

MODEL: Any = {"model": "openai/policy", "api_base": os.environ["OPENAI_BASE_URL"], "num_retries": 0}


def chat(*, streams: bool) -> None:
    """Whole histories of Chat Completions."""
    messages, left = chat_question(), list(FOLLOW_UPS)
    while True:
        if streams:
            chunks = list(litellm.completion(**MODEL, messages=messages, tools=chat_tools(), stream=True))
            message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
        else:
            message = litellm.completion(**MODEL, messages=messages, tools=chat_tools()).choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": chat_result(call.function.name)})
        if not message.tool_calls:
            if not left:
                return
            messages.append({"role": "user", "content": left.pop(0)})


def responses(*, streams: bool) -> None:
    """Whole histories of Responses."""
    items, left = responses_question(), list(FOLLOW_UPS)
    while True:
        asked: Any = {**MODEL, "instructions": INSTRUCTIONS, "input": items, "tools": responses_tools()}
        response = list(litellm.responses(**asked, stream=True))[-1].response if streams else litellm.responses(**asked)
        output = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in response.output]
        items += output
        calls = [item for item in output if item["type"] == "function_call"]
        for call in calls:
            result = responses_result(call["name"])
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
        if not calls:
            if not left:
                return
            items.append({"role": "user", "content": left.pop(0)})


async def messages() -> None:
    """Anthropic's Messages, which litellm translates."""
    source = {"type": "base64", "media_type": "image/png", "data": SCREEN.partition(",")[2]}
    image = {"type": "image", "source": source}
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in FUNCTIONS
    ]
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK}, image]}]
    left = list(FOLLOW_UPS)
    while True:
        answer: Any = await litellm.anthropic_messages(
            **MODEL, messages=history, tools=tools, system=INSTRUCTIONS, max_tokens=400
        )
        history.append({"role": "assistant", "content": answer["content"]})
        results: list[Any] = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": [{"type": "text", "text": "Here."}, image] if block["name"] == "screenshot" else "ok",
            }
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        if not results and not left:
            return
        history.append({"role": "user", "content": results or left.pop(0)})


api = sys.argv[1]
if api == "messages":
    asyncio.run(messages())
elif api.startswith("chat"):
    chat(streams=api.endswith("stream"))
else:
    responses(streams=api.endswith("stream"))
