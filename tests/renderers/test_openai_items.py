from base64 import b64encode

import pytest

from cua_rl.renderers.openai_items import (
    Conversation,
    RequestError,
    conversation_from_chat,
    conversation_from_responses,
    responses_input,
    responses_tools,
)
from cua_rl.types.conversation import (
    EncodedImage,
    Message,
    Reasoning,
    SampledAnswer,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from tests.builders import stored_image
from tests.renderers.generated import encode_image, generate_conversation, make_image

PNG = encode_image(make_image(8, 8))
JPEG = encode_image(make_image(8, 8), "jpeg")
PNG_URL = f"data:image/png;base64,{b64encode(PNG).decode()}"
JPEG_URL = f"data:image/jpeg;base64,{b64encode(JPEG).decode()}"
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}


def message(role: str, *parts: str | EncodedImage) -> Message:
    return Message(role=role, content=tuple(TextPart(text=part) if isinstance(part, str) else part for part in parts))


EXPECTED = Conversation(
    items=(
        message("system", "You operate a phone."),
        message("user", "Look:", stored_image(PNG)),
        Reasoning(text="hm"),
        message("assistant", "I click."),
        ToolCall(call_id="c1", name="click", arguments='{"x": 1}'),
        ToolResult(call_id="c1", content=(TextPart(text="ok"), stored_image(JPEG))),
    ),
    tools=(Tool(name="click", description="Tap", parameters=PARAMETERS),),
)


def test_a_responses_request_becomes_a_conversation() -> None:
    request = {
        "instructions": "You operate a phone.",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Look:"},
                    {"type": "input_image", "image_url": PNG_URL, "detail": "auto"},
                ],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I click.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "click", "arguments": '{"x": 1}', "id": "fc_1"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "ok"}, {"type": "input_image", "image_url": JPEG_URL}],
            },
        ],
        "tools": [
            {"type": "function", "name": "click", "description": "Tap", "parameters": PARAMETERS, "strict": False}
        ],
    }
    assert conversation_from_responses(request) == EXPECTED


def test_a_chat_request_becomes_the_same_conversation() -> None:
    request = {
        "messages": [
            {"role": "system", "content": "You operate a phone."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look:"},
                    {"type": "image_url", "image_url": {"url": PNG_URL}},
                ],
            },
            {
                "role": "assistant",
                "reasoning_content": "hm",
                "content": "I click.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "click", "arguments": '{"x": 1}'}}
                ],
            },
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "text", "text": "ok"}, {"type": "image_url", "image_url": {"url": JPEG_URL}}],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "click", "description": "Tap", "parameters": PARAMETERS}}],
    }
    assert conversation_from_chat(request) == EXPECTED


@pytest.mark.parametrize(("field", "value"), [("stop", [5]), ("stop", {}), ("max_tokens", 0), ("max_tokens", "9")])
def test_limits_that_are_none_are_refused(field: str, value: object) -> None:
    request: dict[str, object] = {"messages": [{"role": "user", "content": "go"}], field: value}
    with pytest.raises(RequestError, match=f"at {field}, got"):
        conversation_from_chat(request)


def test_more_stops_than_an_agent_can_need_are_refused() -> None:
    request: dict[str, object] = {"messages": [{"role": "user", "content": "go"}], "stop": ["x"] * 65}
    with pytest.raises(RequestError, match="at most 64 texts at stop, got 65"):
        conversation_from_chat(request)


def test_plain_strings_are_understood_in_both_forms() -> None:
    expected = Conversation(items=(message("user", "hi"),), tools=())
    assert conversation_from_responses({"input": "hi"}) == expected
    assert conversation_from_chat({"messages": [{"role": "user", "content": "hi"}], "tools": None}) == expected
    output = {"type": "function_call_output", "call_id": "c", "output": "done"}
    assert conversation_from_responses({"input": [output]}).items == (
        ToolResult(call_id="c", content=(TextPart(text="done"),)),
    )


def test_a_chat_answer_of_calls_alone_has_no_empty_message() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "click", "arguments": "{}"}}
    for content in (None, ""):
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        assert conversation_from_chat({"messages": [answer]}).items == (
            ToolCall(call_id="c1", name="click", arguments="{}"),
        )
    assert conversation_from_chat({"messages": [{"role": "assistant", "content": ""}]}).items == (
        message("assistant", ""),
    )


def test_a_summary_stands_in_for_a_thought_that_was_not_given() -> None:
    item = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "in short"}]}
    assert conversation_from_responses({"input": [item]}).items == (Reasoning(text="in short"),)


def test_items_survive_the_way_to_responses_and_back() -> None:
    for seed in range(40):
        made = generate_conversation(seed)
        request = {"input": responses_input(made.items), "tools": responses_tools(made.tools)}
        back = conversation_from_responses(request)
        assert back.tools == tuple(made.tools)
        assert back.items == tuple(_as_message(item) for item in made.items)


def test_tools_carry_no_strict_flag_into_the_prompt() -> None:
    assert responses_tools(EXPECTED.tools) == [
        {"type": "function", "name": "click", "description": "Tap", "parameters": PARAMETERS}
    ]


def user(part: object) -> dict[str, object]:
    return {"input": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("request_body", "place"),
    [
        (user({"type": "input_image", "image_url": "https://example.com/a.png"}), r"input\[0\].content\[0\].image_url"),
        (user({"type": "input_image", "image_url": "file:///etc/passwd"}), "data: URL"),
        (user({"type": "input_image", "image_url": "data:image/gif;base64,R0lGODdh"}), "data: URL"),
        (user({"type": "input_image", "image_url": "data:image/png;base64,R0lGODdh"}), "PNG or JPEG bytes"),
        (user({"type": "input_image", "image_url": "data:image/png;base64,!!"}), "base64 image data"),
        (user({"type": "input_image", "file_id": "f"}), "data: URL"),
        (user({"type": "input_audio"}), "a part of text or an image"),
        (user({"type": "input_text", "text": 5}), r"input\[0\].content\[0\].text"),
        (user({"type": "input_text", "text": "\ud800"}), "valid Unicode"),
        ({"input": 5}, "a list at input"),
        ({"input": ["text"]}, r"an object at input\[0\]"),
        ({"input": [{"role": "critic", "content": "x"}]}, "a role among"),
        ({"input": [{"type": "computer_call"}]}, "message, reasoning, function_call"),
        (
            {"input": [{"type": "function_call", "call_id": 5, "name": "click", "arguments": "{}"}]},
            r"input\[0\].call_id",
        ),
        ({"input": [{"role": "system", "content": [{"type": "input_image", "image_url": PNG_URL}]}]}, "system"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "a tool of type function"),
        ({"input": "x", "tools": {}}, "a list at tools"),
        ({"input": "x", "instructions": 5}, "request.instructions"),
    ],
)
def test_what_cannot_be_given_to_the_model_is_refused_with_its_place(
    request_body: dict[str, object], place: str
) -> None:
    with pytest.raises(RequestError, match=place):
        conversation_from_responses(request_body)


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([{"role": "function", "name": "f", "content": "x"}], "a role among"),
        ([{"role": "tool", "content": "x"}], "1 results without an id after 0 calls"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], r"messages\[0\].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], r"messages\[0\].tool_calls\[0\].function"),
        ([{"role": "assistant", "content": "x", "reasoning_content": "\ud800"}], r"Unicode at messages\[0\].reasoning"),
        ([{"role": "assistant", "content": "x", "reasoning": "\ud800"}], r"Unicode at messages\[0\].reasoning"),
        ("hi", "a list at messages"),
    ],
)
def test_malformed_chat_requests_are_refused_with_the_place(messages: object, place: str) -> None:
    with pytest.raises(RequestError, match=place):
        conversation_from_chat({"messages": messages})


def _as_message(item: object) -> object:
    return message("assistant", item.text) if isinstance(item, SampledAnswer) else item
