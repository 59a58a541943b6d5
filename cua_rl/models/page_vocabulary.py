"""What a tiny model for web pages has single tokens for, beyond those of the phone: everything else is bytes."""

import json
from collections.abc import Iterator, Mapping

from cua_rl.agent.tools import COMPUTER_USE, load_system_prompt
from cua_rl.conversation import Message, TextPart
from cua_rl.models.tokenizer import build_tokenizer
from cua_rl.renderers.qwen3_vl import END_OF_TURN, Qwen3VLRenderer
from cua_rl.tasks.miniwob.tiny_tasks import INSTRUCTION_PIECES, LABELS

CLICK_PREFIX = f'<tool_call>\n{{"name": "{COMPUTER_USE.name}", "arguments": {{"action": "left_click", "coordinate": ['


def page_pieces() -> list[str]:
    """All texts that are one token, in the order of their ids."""
    forms = (form for label in LABELS for form in label_forms(label))
    return list(dict.fromkeys([system_block(), CLICK_PREFIX, *_calls(), *forms, *INSTRUCTION_PIECES]))


def label_forms(label: str) -> tuple[str, str, str]:
    """How a label stands in texts: after a space, at the start of a line, and quoted."""
    return f" {label}", f"\n{label}", f' "{label}"'


def system_block() -> str:
    """System prompt and tool description, from the role's name to the end of turn, as the renderer writes them."""
    renderer = Qwen3VLRenderer(name="qwen3_vl", tokenizer=build_tokenizer([]), image_settings=None)
    system = Message(role="system", content=(TextPart(text=load_system_prompt("browser")),))
    prompt = renderer.decode(renderer.render([system], [COMPUTER_USE]).token_ids(image_token_id=-1))
    return prompt.removeprefix("<|im_start|>").partition(END_OF_TURN)[0]


def _calls() -> Iterator[str]:
    """Other calls, up to their first variable part."""
    for status in ("success", "failure"):
        yield _call({"action": "terminate", "status": status})
    for action, name in (("type", "text"), ("answer", "text")):
        yield _call({"action": action, name: ""}).removesuffix('"}}\n</tool_call>')


def _call(arguments: Mapping[str, object]) -> str:
    return f'<tool_call>\n{{"name": "{COMPUTER_USE.name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
