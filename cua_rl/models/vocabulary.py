"""What the tiny model has single tokens for: the fixed text of its protocol, the words of its world, its numbers.

Everything else falls back to bytes, so any text can be read and written. Long pieces keep sequences short, which makes
the tiny model trainable on a laptop; they match only if agent, tools and chat template write exactly these bytes.
"""

import json
from collections.abc import Iterator, Mapping

from cua_rl.agent.tools import MAX_COORDINATE, MOBILE_USE, load_system_prompt
from cua_rl.conversation import Message, TextPart
from cua_rl.devices.simulator.catalog import APPS, SETTINGS
from cua_rl.models.tokenizer import build_tokenizer
from cua_rl.renderers.qwen3_vl import END_OF_TURN, Qwen3VLRenderer

COORDINATE_STEP = 5
"""The tiny model points in steps of this, 0-1000 on both axes."""

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_ROLES = ("user\n", "assistant\n", "user\n<tool_response>\n", "\n</tool_response>", "\n</think>\n\n", ", ")

_WORDS = """
Open Turn on off the app List apps you see settings Go to page of in and mode theme saver not phone time is screen home
first Set Mute Show Switch Add Write Send a new note message that says What battery level percent Answer with number
brightness media volume maximum minimum timeout minutes minute seconds automatic recent which was open moment ago
"""


def pieces() -> list[str]:
    """All texts that are one token, in the order of their ids."""
    seen = dict.fromkeys([*MARKS, *_ROLES, _system_block(), *_calls(), *_words(), *_coordinates()])
    return list(seen)


def names() -> list[str]:
    """The names of everything the tiny model points at: a token after a space, and another at the start of a line."""
    return [*(spec.label for spec in APPS.values()), *(spec.label for spec in SETTINGS.values())]


def _system_block() -> str:
    """System prompt and tool description, from the role's name to the end of turn, as the renderer writes them."""
    renderer = Qwen3VLRenderer(name="qwen3_vl", tokenizer=build_tokenizer([]), image_settings=None)
    system = Message(role="system", content=(TextPart(text=load_system_prompt("android")),))
    prompt = renderer.decode(renderer.render([system], [MOBILE_USE]).token_ids(image_token_id=-1))
    return prompt.removeprefix("<|im_start|>").partition(END_OF_TURN)[0]


def _calls() -> Iterator[str]:
    """Tool calls up to their first variable part, and what closes them."""
    for action in ("click", "long_press", "swipe"):
        yield _call({"action": action, "coordinate": ""}).removesuffix('""}}\n</tool_call>') + "["
    for action in ("type", "answer"):
        yield _call({"action": action, "text": ""}).removesuffix('"}}\n</tool_call>')
    for button in ("Back", "Home", "Menu", "Enter"):
        yield _call({"action": "system_button", "button": button})
    for status in ("success", "failure"):
        yield _call({"action": "terminate", "status": status})
    yield _call({"action": "wait", "time": 1})
    yield from ("]}}\n</tool_call>", '"}}\n</tool_call>', '], "coordinate2": [')


def _call(arguments: Mapping[str, object]) -> str:
    return f'<tool_call>\n{{"name": "{MOBILE_USE.name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _words() -> Iterator[str]:
    """Words as they follow a space; names also as they begin a thought; sentence beginnings as they are."""
    words = _WORDS.split()
    titles = [word for spec in SETTINGS.values() for word in spec.title.split()]
    for name in names():
        yield from (f"\n{name}", f" {name}")
    yield from (f" {word}" for word in (*titles, *words))
    yield from (word for word in words if word[0].isupper())


def _coordinates() -> Iterator[str]:
    return (str(number) for number in range(0, MAX_COORDINATE + 1, COORDINATE_STEP))
