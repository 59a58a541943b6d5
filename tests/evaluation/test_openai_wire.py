import pytest

from cua_rl.evaluation.openai_wire import chat_body, parse_chat_reply, parse_responses_reply, responses_body
from cua_rl.types.conversation import EncodedImage, Item, Message, Reasoning, TextPart, Tool, ToolCall, ToolResult
from cua_rl.types.errors import SamplingError
from cua_rl.types.rollout import SamplingParams

SCREEN = EncodedImage(data=b"\x89PNG\r\n\x1a\nscreen", format="png", width_px=10, height_px=20)
URL = "data:image/png;base64,iVBORw0KGgpzY3JlZW4="
TOOL = Tool(name="mobile_use", description="Act.", parameters={"type": "object"})
PARAMS = SamplingParams(max_tokens=64, temperature=0.5)
ITEMS: list[Item] = [
    Message(role="system", content=(TextPart(text="Be good."),)),
    Message(role="user", content=(TextPart(text="Open Mail."), SCREEN)),
    Reasoning(text="It is there."),
    ToolCall(call_id="c1", name="mobile_use", arguments="{}"),
    ToolResult(call_id="c1", content=(SCREEN,)),
]


def test_chat_puts_screenshots_of_tool_results_into_a_message_of_the_user() -> None:
    body = chat_body(ITEMS, [TOOL], "gpt", PARAMS)

    image = {"type": "image_url", "image_url": {"url": URL}}
    assert body["messages"] == [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": [{"type": "text", "text": "Open Mail."}, image]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "mobile_use", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Done."},
        {"role": "user", "content": [image]},
    ]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("gpt", 0.5, 64)
    assert body["tools"][0]["function"]["name"] == "mobile_use"


def test_responses_leaves_thoughts_out_and_keeps_the_rest() -> None:
    body = responses_body(ITEMS, [TOOL], "gpt", PARAMS)

    assert [item["type"] for item in body["input"]] == ["message", "message", "function_call", "function_call_output"]
    assert body["input"][3]["output"] == [{"type": "input_image", "image_url": URL, "detail": "auto"}]
    assert (body["store"], body["max_output_tokens"], body["tools"][0]["strict"]) == (False, 64, False)


def test_a_response_object_is_taken_apart() -> None:
    reply = parse_responses_reply(
        {
            "status": "incomplete",
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "message", "content": [{"type": "output_text", "text": "so"}]},
                {"type": "function_call", "call_id": "c7", "name": "mobile_use", "arguments": "{}"},
                {"type": "web_search_call", "id": "w"},
            ],
            "usage": {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 2}},
        }
    )

    assert (reply.parsed.reasoning, reply.parsed.text, reply.is_complete) == ("hm", "so", False)
    assert reply.parsed.tool_calls == (ToolCall(call_id="c7", name="mobile_use", arguments="{}"),)
    assert (reply.num_prompt_tokens, reply.num_cached_tokens, reply.num_sampled_tokens) == (9, 2, 4)


def test_calls_left_in_the_text_by_a_server_without_a_tool_parser_are_read() -> None:
    text = '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "wait"}}\n</tool_call>'
    reply = parse_chat_reply({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    (call,) = reply.parsed.tool_calls
    assert (call.name, call.arguments, reply.parsed.text) == ("mobile_use", '{"action": "wait"}', "")
    assert reply.num_prompt_tokens == 0


def test_a_call_in_tags_has_the_types_that_its_tool_declares() -> None:
    tool = Tool(name="tap", description="", parameters={"properties": {"x": {"type": "integer"}}})
    text = "<tool_call>\n<function=tap>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>"
    reply = parse_chat_reply({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}, [tool])
    assert [call.arguments for call in reply.parsed.tool_calls] == ['{"x": 5}']


def test_arguments_that_are_no_text_become_json() -> None:
    call = {"id": None, "function": {"name": "mobile_use", "arguments": {"action": "wait"}}}
    reply = parse_chat_reply({"choices": [{"message": {"content": None, "tool_calls": [call]}}]})

    assert reply.parsed.tool_calls[0].arguments == '{"action": "wait"}'
    assert reply.parsed.tool_calls[0].call_id.startswith("call_")


@pytest.mark.parametrize("body", [None, [], {}, {"choices": []}, {"output": [{"type": "message"}]}, "<html>"])
def test_what_is_no_reply_says_what_came(body: object) -> None:
    for parse in (parse_chat_reply, parse_responses_reply):
        with pytest.raises(SamplingError, match="set api to responses or chat"):
            parse(body)
