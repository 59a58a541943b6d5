"""The openai package: the loops of its own examples."""

import sys
from typing import Any

from openai import OpenAI
from world import (
    FOLLOW_UPS,
    INSTRUCTIONS,
    chat_question,
    chat_result,
    chat_tools,
    responses_question,
    responses_result,
    responses_tools,
)

client = OpenAI(max_retries=0)


def chat(*, streams: bool) -> None:
    """Whole histories of Chat Completions."""
    messages, left = chat_question(), list(FOLLOW_UPS)
    while True:
        asked: Any = {"model": "policy", "messages": messages, "tools": chat_tools()}
        if streams:
            with client.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": chat_result(call.function.name)})
        if not message.tool_calls:
            if not left:
                return
            messages.append({"role": "user", "content": left.pop(0)})


def responses(*, streams: bool, names_previous: bool) -> None:
    """Whole histories of Responses, or only what is new."""
    items, left = responses_question(), list(FOLLOW_UPS)
    previous: dict[str, str] = {}
    while True:
        asked: Any = {"model": "policy", "instructions": INSTRUCTIONS, "input": items, "tools": responses_tools()}
        if streams:
            with client.responses.stream(**asked, **previous) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**asked, **previous)
        if names_previous:
            items, previous = [], {"previous_response_id": response.id}
        else:
            items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        for call in calls:
            output = responses_result(call.name)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        if not calls:
            if not left:
                return
            items.append({"role": "user", "content": left.pop(0)})


api = sys.argv[1]
if api.startswith("chat"):
    chat(streams=api.endswith("stream"))
else:
    responses(streams=api.endswith("stream"), names_previous=api.endswith("previous"))
