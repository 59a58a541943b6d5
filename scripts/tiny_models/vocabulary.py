# pyright: reportUnknownMemberType=false
"""The tokenizer of the tiny models; single tokens are the fixed text of the protocol, words of their tasks, numbers.

Everything else falls back to bytes, so any text can be read and written. Long pieces keep sequences short, which makes
the tiny models trainable on a laptop; they match only if agent, tools and chat template write exactly these bytes. The
model for web pages extends the one for phones (`scripts.tiny_models.extended_model`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cua_rl.agent.tools import COMPUTER_USE, MAX_COORDINATE, MOBILE_USE, load_system_prompt
from cua_rl.environments.device import DeviceKind
from cua_rl.environments.phone.simulator.catalog import APPS, SETTINGS
from cua_rl.renderers.qwen3_vl import END_OF_TURN, Qwen3VLRenderer
from cua_rl.supervised.demonstrations import COORDINATE_STEP
from cua_rl.types.conversation import Message, TextPart, Tool
from scripts.tiny_models.page_tasks import INSTRUCTION_PIECES, LABELS

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Special tokens, which texts cannot contain; their ids follow those of the bytes."""

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_ROLES = ("user\n", "assistant\n", "user\n<tool_response>\n", "\n</tool_response>", "\n</think>\n\n", ", ")

_WORDS = """
Open Turn on off the app List apps you see settings Go to page of in and mode theme saver not phone time is screen home
first Set Mute Show Switch Add Write Send a new note message that says What battery level percent Answer with number
brightness media volume maximum minimum timeout minutes minute seconds automatic recent which was open moment ago
"""


LARGEST_SUMMAND = 100
"""Of the numbers that the model for arithmetic adds."""


def build_tokenizer(pieces: Sequence[str]) -> Tokenizer:
    """Byte-level BPE without merges: ids 0-255 are bytes, then come control tokens, then `pieces` as added tokens.

    If several pieces match, the leftmost is taken, and the longest of those.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in pieces if text not in alphabet])
    return tokenizer


def pieces() -> list[str]:
    """Single tokens of the model for phones, in the order of their ids."""
    numbers = (str(number) for number in range(0, MAX_COORDINATE + 1, COORDINATE_STEP))
    return list(dict.fromkeys([*MARKS, *_ROLES, system_block("android", MOBILE_USE), *_calls(), *_words(), *numbers]))


def arithmetic_pieces() -> list[str]:
    """Single tokens of the model that adds, in the order of their ids."""
    return [*MARKS, *_ROLES[:2], "What is ", " + ", *map(str, range(2 * LARGEST_SUMMAND + 1))]


def page_pieces() -> list[str]:
    """Single tokens that the model for web pages has in addition, in the order of their ids."""
    calls = [_call(COMPUTER_USE, {"action": "terminate", "status": status}) for status in ("success", "failure")]
    for action, name in (("type", "text"), ("answer", "text")):
        calls.append(_call(COMPUTER_USE, {"action": action, name: ""}).removesuffix('"}}\n</tool_call>'))
    forms = (form for label in LABELS for form in label_forms(label))
    click = click_prefix(COMPUTER_USE, "left_click")
    return list(dict.fromkeys([system_block("browser", COMPUTER_USE), click, *calls, *forms, *INSTRUCTION_PIECES]))


def label_forms(label: str) -> tuple[str, str, str]:
    """A label in texts: after a space, at the start of a line, and quoted."""
    return f" {label}", f"\n{label}", f' "{label}"'


def names() -> list[str]:
    """Names of everything the model for phones clicks on: a token after a space, and another at the start of a line."""
    return [*(spec.label for spec in APPS.values()), *(spec.label for spec in SETTINGS.values())]


def system_block(kind: DeviceKind, tool: Tool) -> str:
    """System prompt and tool description, from the role's name to the end of turn, as the renderer writes them."""
    renderer = Qwen3VLRenderer(name="qwen3_vl", tokenizer=build_tokenizer([]), image_settings=None)
    system = Message(role="system", content=(TextPart(text=load_system_prompt(kind)),))
    prompt = renderer.decode(renderer.render([system], [tool]).token_ids(image_token_id=-1))
    return prompt.removeprefix("<|im_start|>").partition(END_OF_TURN)[0]


def _calls() -> Iterator[str]:
    """Tool calls up to their first variable part, and the texts that close them."""
    for action in ("click", "long_press", "swipe"):
        yield click_prefix(MOBILE_USE, action)
    for action in ("type", "answer"):
        yield _call(MOBILE_USE, {"action": action, "text": ""}).removesuffix('"}}\n</tool_call>')
    for button in ("Back", "Home", "Menu", "Enter"):
        yield _call(MOBILE_USE, {"action": "system_button", "button": button})
    for status in ("success", "failure"):
        yield _call(MOBILE_USE, {"action": "terminate", "status": status})
    yield _call(MOBILE_USE, {"action": "wait", "time": 1})
    yield from ("]}}\n</tool_call>", '"}}\n</tool_call>', '], "coordinate2": [')


def click_prefix(tool: Tool, action: str) -> str:
    """The call of a click up to its coordinate."""
    return _call(tool, {"action": action, "coordinate": ""}).removesuffix('""}}\n</tool_call>') + "["


def _call(tool: Tool, arguments: Mapping[str, object]) -> str:
    return f'<tool_call>\n{{"name": "{tool.name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _words() -> Iterator[str]:
    """Words after a space; names also at the start of a line, as in reasoning; words that begin sentences."""
    words = _WORDS.split()
    titles = [word for spec in SETTINGS.values() for word in spec.title.split()]
    for name in names():
        yield from (f"\n{name}", f" {name}")
    yield from (f" {word}" for word in (*titles, *words))
    yield from (word for word in words if word[0].isupper())
