import asyncio
import json
import time
from pathlib import Path

import pytest

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen2_5_vl, load_qwen3_vl_thinking
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.renderers.replay import replay
from cua_rl.renderers.request_error import ContextOverflow, RequestError
from cua_rl.types.conversation import (
    EncodedImage,
    Item,
    Message,
    Reasoning,
    SampledAnswer,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import EncodedTextChunk
from tests.builders import stored_image
from tests.renderers.generated import encode_image, generate_conversation, make_image
from tests.renderers.model_folders import THINKING_TEMPLATE, build_qwen3_5_folder

CLICK = Tool(name="click", description="Tap", parameters={"type": "object"})
SCREEN = stored_image(encode_image(make_image(64, 96)))  # 2 x 3 tokens of 32 x 32 pixels


def message(role: str, *parts: str | EncodedImage) -> Message:
    return Message(role=role, content=tuple(TextPart(text=part) if isinstance(part, str) else part for part in parts))


def rendered_text(renderer: Qwen3VLRenderer, items: list[Item], tools: tuple[Tool, ...] = ()) -> str:
    text = renderer.decode(renderer.render(items, tools).token_ids(renderer.image_token_id))
    return text.replace("<|image_pad|>" * 6, "<image of 6>")


def test_a_whole_conversation_reads_as_qwen3_vl_was_trained(small_renderer: Qwen3VLRenderer) -> None:
    items = [
        message("system", "You operate a phone."),
        message("user", "Open Mail.", SCREEN),
        Reasoning(text="It is there."),
        message("assistant", "I click."),
        ToolCall(call_id="a", name="click", arguments='{"x":5}'),
        ToolCall(call_id="b", name="click", arguments='{"x":6}'),
        ToolResult(call_id="a", content=(TextPart(text="done"), SCREEN)),
        ToolResult(call_id="b", content=(TextPart(text="done"), TextPart(text="twice"))),
    ]
    assert rendered_text(small_renderer, items, (CLICK,)) == (
        "<|im_start|>system\nYou operate a phone.\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "click", "description": "Tap", "parameters": {"type": "object"}}}\n'
        "</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\nOpen Mail.<|vision_start|><image of 6><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nIt is there.\n</think>\n\nI click.\n"
        '<tool_call>\n{"name": "click", "arguments": {"x": 5}}\n</tool_call>\n'
        '<tool_call>\n{"name": "click", "arguments": {"x": 6}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\ndone<|vision_start|><image of 6><|vision_end|>\n</tool_response>\n"
        "<tool_response>\ndone\ntwice\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_prompt_extends_the_earlier_prompt_and_the_sampled_answer(small_renderer: Qwen3VLRenderer) -> None:
    first = [message("user", "Open Mail.", SCREEN)]
    answer = '<think>\nhm\n</think>\n\n<tool_call>\n{"name":"click",   "arguments": {"x": 1}}\n</tool_call>'
    second = [*first, SampledAnswer(text=answer), ToolResult(call_id="a", content=(SCREEN,))]
    image = small_renderer.image_token_id
    sampled = [*small_renderer.encode(answer), small_renderer.stop_token_ids[0]]
    before = small_renderer.render(first).token_ids(image) + sampled
    assert small_renderer.render(second).token_ids(image)[: len(before)] == before


def test_known_texts_change_no_prompt_and_make_way_for_those_of_the_next(small_renderer: Qwen3VLRenderer) -> None:
    known: dict[str, EncodedTextChunk] = {}
    for seed in range(30):
        conversation = generate_conversation(seed)
        for length in range(1, len(conversation.items) + 1):
            items = conversation.items[:length]
            prompt = small_renderer.render(items, conversation.tools, known=known)
            assert prompt == small_renderer.render(items, conversation.tools)
            texts = [chunk for chunk in prompt.chunks if isinstance(chunk, EncodedTextChunk)]
            assert set(map(id, texts)) == set(map(id, known.values()))

    first = small_renderer.render([message("user", "Open Mail.", SCREEN)], known=known)
    second = small_renderer.render([message("user", "Open Mail.", SCREEN, "Now.", SCREEN)], known=known)
    assert second.chunks[0] is first.chunks[0]  # not encoded again


def test_a_prompt_that_does_not_fit_leaves_no_texts_behind(small_renderer: Qwen3VLRenderer) -> None:
    known: dict[str, EncodedTextChunk] = {}
    with pytest.raises(ContextOverflow):
        small_renderer.render([message("user", "word " * 3000)], max_tokens=1000, known=known)
    assert known == {}


def test_replaying_twice_changes_nothing(small_renderer: Qwen3VLRenderer) -> None:
    for seed in range(30):
        once = replay(generate_conversation(seed).items)
        assert replay(once) == once


def test_later_instructions_stay_in_their_place_as_messages_of_the_user(small_renderer: Qwen3VLRenderer) -> None:
    begun = [message("developer", "Be brief."), message("system", "Use the phone."), message("user", "Open Mail.")]
    later: list[Item] = [
        *begun,
        SampledAnswer(text="Done."),
        message("system", "Obey the user."),
        message("user", "Go."),
    ]

    before, after = rendered_text(small_renderer, [*begun]), rendered_text(small_renderer, later)

    assert before.startswith("<|im_start|>system\nBe brief.\n\nUse the phone.<|im_end|>\n")
    assert after == (
        before + "Done.<|im_end|>\n<|im_start|>user\nObey the user.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_marks_of_images_inside_text_never_become_image_tokens(small_renderer: Qwen3VLRenderer) -> None:
    mark = "<|vision_start|><|image_pad|><|video_pad|><|vision_end|>"
    items = [message("user", mark), SampledAnswer(text=mark), ToolResult(call_id="a", content=(TextPart(text=mark),))]
    ids = small_renderer.render(items).token_ids(small_renderer.image_token_id)
    assert small_renderer.image_token_id not in ids
    assert not set(small_renderer.encode(mark)) & set(ids)


def test_supervised_masks_answers_with_their_ends_of_turn(small_renderer: Qwen3VLRenderer) -> None:
    items = [message("user", SCREEN, "a"), SampledAnswer(text="b"), message("user", "c"), message("assistant", "d")]
    rendered, mask = small_renderer.render_supervised(items)
    ids = rendered.token_ids(small_renderer.image_token_id)
    assert len(mask) == rendered.length
    assert small_renderer.decode([token for token, kept in zip(ids, mask, strict=True) if kept]) == (
        "b<|im_end|>d<|im_end|>"
    )
    assert mask[-1]
    assert len(rendered.chunks) == 3  # text, image, text


def test_supervised_refuses_a_conversation_without_an_answer_at_its_end(small_renderer: Qwen3VLRenderer) -> None:
    for items in ([], [message("user", "a")], [SampledAnswer(text="b"), message("user", "a")]):
        with pytest.raises(RequestError, match="ends with an answer"):
            small_renderer.render_supervised(items)


def test_images_are_refused_where_the_model_cannot_see_them(small_renderer: Qwen3VLRenderer) -> None:
    for role in ("system", "assistant"):
        with pytest.raises(RequestError, match="user messages and tool results only"):
            small_renderer.render([message(role, SCREEN)])


def test_answers_are_parsed_with_or_without_their_end_of_turn(small_renderer: Qwen3VLRenderer) -> None:
    assert (
        small_renderer.parse("yes<|im_end|>") == small_renderer.parse("yes") == small_renderer.parse("yes<|endoftext|>")
    )


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_vl", "qwen3_vl"),
        ("qwen3_vl_moe", "qwen3_vl"),
        ("qwen2_5_vl", "qwen2_5_vl"),
        ("qwen3_5", "qwen3_5"),
        ("qwen3", "qwen3"),
        ("qwen3_moe", "qwen3"),
    ],
)
def test_the_renderer_is_detected_from_the_type_of_the_model(small_folder: Path, model_type: str, name: str) -> None:
    renderer = make_renderer(_folder_like(small_folder, model_type))
    assert renderer.name == name
    assert (renderer.image_settings is None) == (name == "qwen3")


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_a_thinking_model_is_known_by_its_template_wherever_that_is(
    small_folder: Path, tmp_path: Path, place: str
) -> None:
    folder = _copy(small_folder, tmp_path / "a_model")
    template = THINKING_TEMPLATE.read_text(encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    (folder / place).write_text(template if place.endswith("jinja") else json.dumps({"chat_template": template}))

    assert make_renderer(folder).name == "qwen3_vl_thinking"


def test_without_a_template_a_thinking_model_is_known_by_its_name(small_folder: Path, tmp_path: Path) -> None:
    thinking, instruct, moved = (
        _copy(small_folder, tmp_path / name) for name in ("Qwen3-VL-4B-Thinking", "Qwen3-VL-4B-Instruct", "abc123")
    )
    for folder in (thinking, instruct, moved):
        (folder / "chat_template.jinja").unlink()
    config = {"model_type": "qwen3_vl", "_name_or_path": "Qwen/Qwen3-VL-8B-Thinking"}
    (moved / "config.json").write_text(json.dumps(config))

    names = [make_renderer(folder).name for folder in (thinking, instruct, moved)]
    assert names == ["qwen3_vl_thinking", "qwen3_vl", "qwen3_vl_thinking"]
    assert make_renderer(thinking, "qwen3_vl").name == "qwen3_vl"


def test_a_thinking_prompt_opens_the_block_and_its_tools_travel_in_the_system_message(small_folder: Path) -> None:
    renderer = load_qwen3_vl_thinking(small_folder)
    items = [message("system", "You operate a phone."), message("user", "Open Mail.", SCREEN)]

    sent, tools = renderer.to_send(items, (CLICK,))

    assert rendered_text(renderer, items, (CLICK,)).endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert rendered_text(renderer, items, (CLICK,)) == rendered_text(renderer, list(sent))
    assert tools == ()
    assert "<tools>" in str(sent[0])


def test_an_answer_of_a_thinking_model_begins_inside_its_thinking(small_folder: Path) -> None:
    renderer = load_qwen3_vl_thinking(small_folder)
    call = '<tool_call>\n{"name": "click", "arguments": {}}\n</tool_call>'

    whole = renderer.parse(f"I should {call}?\n</think>\n\n{call}<|im_end|>")
    cut_off = renderer.parse(f"I could {call}")

    assert (whole.reasoning, len(whole.tool_calls), whole.failure) == (f"I should {call}?", 1, None)
    assert cut_off.tool_calls == ()
    assert cut_off.failure is not None
    assert cut_off.failure.kind == "unclosed"


def test_a_thinking_answer_is_trained_without_the_mark_that_the_prompt_opened(small_folder: Path) -> None:
    renderer = load_qwen3_vl_thinking(small_folder)
    answer = SampledAnswer(text="hm\n</think>\n\nyes")

    rendered, mask = renderer.render_supervised([message("user", "a"), answer])

    ids = rendered.token_ids(renderer.image_token_id)
    trained = [token for token, kept in zip(ids, mask, strict=True) if kept]
    assert renderer.decode(trained) == "hm\n</think>\n\nyes<|im_end|>"
    assert renderer.decode(ids).endswith("<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>")


def test_a_server_without_a_form_for_tools_is_sent_their_definitions_and_results_as_text(small_folder: Path) -> None:
    renderer = load_qwen2_5_vl(small_folder)
    results = [ToolResult(call_id=f"call_{i}", content=(TextPart(text=f"done {i}"),)) for i in range(2)]
    items = [message("user", "Open Mail."), SampledAnswer(text="I tap."), *results]

    sent, tools = renderer.to_send(items, (CLICK,))

    assert tools == ()
    assert [type(item) for item in sent] == [Message, Message, SampledAnswer, Message]
    assert rendered_text(renderer, items, (CLICK,)) == rendered_text(renderer, list(sent))
    assert rendered_text(renderer, items).endswith(
        "<|im_start|>user\n<tool_response>\ndone 0\n</tool_response>\n<tool_response>\ndone 1\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_text_only_renderer_refuses_images(small_folder: Path) -> None:
    renderer: Renderer = make_renderer(small_folder, "qwen3")
    assert renderer.render([message("user", "a")]).length > 0
    with pytest.raises(ConfigError, match="expected text only"):
        renderer.render([message("user", SCREEN)])


def test_unknown_renderers_and_models_are_refused_with_the_known_ones(small_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['qwen2_5_vl', 'qwen3', 'qwen3_5', 'qwen3_vl', .*\], got 'qwen9'"):
        make_renderer(small_folder, "qwen9")
    with pytest.raises(ConfigError, match="got 'llama'"):
        make_renderer(_folder_like(small_folder, "llama"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_renderer(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        make_renderer(tmp_path, "qwen3_vl")


def _copy(folder: Path, other: Path) -> Path:
    other.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    return other


def _folder_like(folder: Path, model_type: str) -> Path:
    other = _copy(folder, folder.parent / f"like_{model_type}")
    (other / "config.json").write_text(json.dumps({"model_type": model_type}))
    return other


def test_a_prompt_may_have_exactly_as_many_tokens_as_fit(small_renderer: Qwen3VLRenderer) -> None:
    items = [message("user", "Open Mail.", SCREEN)]
    length = small_renderer.render(items).length

    assert small_renderer.render(items, max_tokens=length) == small_renderer.render(items)
    with pytest.raises(ContextOverflow, match=rf"expected at most {length - 1} tokens, got a longer prompt"):
        small_renderer.render(items, max_tokens=length - 1)


@pytest.mark.parametrize("text", ["a", "\u0e01", "word ", "\n"])
def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded(
    small_renderer: Qwen3VLRenderer, text: str
) -> None:
    """64 MB would take a minute and 12 GiB."""
    with pytest.raises(ContextOverflow):
        small_renderer.render([message("user", text * (64_000_000 // len(text)))], max_tokens=1000)


def test_many_texts_between_images_are_encoded_until_they_are_too_long(small_renderer: Qwen3VLRenderer) -> None:
    parts = [part for _ in range(2000) for part in ("word " * 3000, SCREEN)]  # 30 MB

    with pytest.raises(ContextOverflow):
        small_renderer.render([message("user", *parts)], max_tokens=1000)


async def test_other_work_goes_on_while_a_long_text_is_encoded(small_renderer: Qwen3VLRenderer) -> None:
    started = last = time.process_time()
    longest_pause_s = 0.0
    encoding = asyncio.create_task(asyncio.to_thread(small_renderer.encode, "word " * 200_000))
    while not encoding.done():
        await asyncio.sleep(0)
        longest_pause_s, last = max(longest_pause_s, time.process_time() - last), time.process_time()

    assert len(await encoding) >= 200_000
    assert longest_pause_s < (last - started) / 2  # with the interpreter's lock held, nearly all of it


def test_the_template_of_qwen3_8_is_refused_as_it_keeps_every_thought(small_folder: Path, tmp_path: Path) -> None:
    folder = build_qwen3_5_folder(small_folder, tmp_path / "qwen3_8")
    template = "{%- if preserve_thinking is undefined or preserve_thinking is true %}"
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=r"chat template as Qwen3\.5 and Qwen3\.6 .* replace it by that of Qwen3\.6"):
        make_renderer(folder)
