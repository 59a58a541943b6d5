import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.supervised.conversation_files import ConversationFile, open_conversation_file
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Datum

RENDERER = make_renderer(TINY_QWEN3_VL)
TOOL = {"name": "mobile_use", "description": "Touch.", "parameters": {"type": "object"}}
CLICK = '{"action": "click", "coordinate": [500, 500]}'


async def screenshot() -> bytes:
    return (await make_simulated_phone(TEMPLATES["train_02_enable_wifi"].make_task(seed=1)).observe()).data


def chat(url: str) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "mobile_use", "arguments": CLICK}}
    return {
        "messages": [
            {"role": "system", "content": "You use a phone."},
            {"role": "user", "content": [{"type": "text", "text": "Open Mail."}, image_url(url)]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": [image_url(url)]},
            {"role": "assistant", "content": "Done."},
        ],
        "tools": [{"type": "function", "function": TOOL}],
    }


def responses(url: str) -> dict[str, Any]:
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    return {
        "instructions": "You use a phone.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Open Mail."}, image]},
            {"type": "function_call", "call_id": "a", "name": "mobile_use", "arguments": CLICK},
            {"type": "function_call_output", "call_id": "a", "output": [image]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        ],
        "tools": [{"type": "function", **TOOL}],
    }


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "conversations.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def opened(path: Path, max_tokens: int = 4096) -> ConversationFile:
    return open_conversation_file(path, RENDERER, max_tokens=max_tokens)


def trained_text(datum: Datum) -> str:
    ids = datum.model_input.token_ids(RENDERER.image_token_id)
    return RENDERER.decode([token for token, is_on in zip(ids, datum.loss_mask, strict=True) if is_on])


async def test_only_what_the_assistant_says_is_trained(tmp_path: Path) -> None:
    (tmp_path / "screen.png").write_bytes(await screenshot())
    datum = opened(write(tmp_path, chat("screen.png"))).load(0)
    assert trained_text(datum) == (
        '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [500, 500]}}\n</tool_call>'
        "<|im_end|>Done.<|im_end|>"
    )


async def test_both_forms_and_both_kinds_of_images_give_the_same_sequence(tmp_path: Path) -> None:
    png = await screenshot()
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "screen.png").write_bytes(png)
    data_url = f"data:image/png;base64,{b64encode(png).decode()}"
    path = write(tmp_path, *(form(url) for form in (chat, responses) for url in ("shots/screen.png", data_url)))
    file = opened(path)
    assert len({line.content_sha256 for line in file.lines}) == 1
    assert [image.data for image in file.load(3).model_input.images] == [png, png]


def test_blank_lines_do_not_count_and_lines_are_found_again(tmp_path: Path) -> None:
    def says(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "Say é."}, {"role": "assistant", "content": text}]}

    file = opened(write(tmp_path, says("One"), "\n", says("Two"), "   \n", says("Three")))
    assert [line.number for line in file.lines] == [1, 3, 5]
    assert [trained_text(file.load(index)) for index in (2, 0, 1)] == [
        "Three<|im_end|>",
        "One<|im_end|>",
        "Two<|im_end|>",
    ]
    assert file.load(1).rollout_id == "conversations.jsonl:3"


GOOD = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}
BAD: list[tuple[object, str]] = [
    ("{", "expected a JSON object, got a line that is not JSON"),
    (["Hi."], "expected an object with either messages or input at line"),
    ({"prompt": "Hi."}, "expected an object with either messages or input at line, got ['prompt']"),
    ({"messages": [{"role": "robot", "content": "Hi."}]}, "at messages[0], got 'robot'"),
    ({"messages": GOOD["messages"][:1]}, "expected a conversation that ends with an answer, got Message"),
    ({"messages": [{"role": "user", "content": [image_url("no.png")]}]}, "no.png' (No such file or directory)"),
    ({"messages": [{"role": "user", "content": [image_url("https://x.org/a.png")]}]}, "send the image itself"),
    ({"messages": [GOOD["messages"][0], {**GOOD["messages"][1], "weight": 0}]}, "expected 1, because all answers"),
    ({**GOOD, "tool": []}, "got ['tool']"),  # misspelt: the conversation would have no tools
    ({**GOOD, "instructions": "You use a phone."}, "got ['instructions']"),
    ({"input": GOOD["messages"], "instruction": "You use a phone."}, "got ['instruction']"),
    ({"messages": [GOOD["messages"][0], {**GOOD["messages"][1], "function_call": {"name": "a"}}]}, "['function_call']"),
    ({"input": [{"type": "computer_call"}]}, "at input[0], got 'computer_call'"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(ConfigError) as caught:
        opened(path)
    assert str(caught.value).startswith(f"{path}:2: expected ")
    assert message in str(caught.value)


def test_a_conversation_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"conversations.jsonl:1: expected at most 4 tokens, got \d+; shorten"):
        opened(write(tmp_path, GOOD), max_tokens=4)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "screen.png").write_bytes(b"not an image")
    with pytest.raises(ConfigError, match=r"conversations.jsonl:1: expected PNG or JPEG bytes"):
        opened(write(tmp_path, chat("screen.png")))


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected conversations, one a line, got .* without any"):
        opened(write(tmp_path, "\n"))
    with pytest.raises(ConfigError, match=r"expected a file of conversations at .*nowhere.jsonl"):
        opened(tmp_path / "nowhere.jsonl")
