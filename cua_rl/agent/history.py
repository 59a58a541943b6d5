"""The conversation as Responses items (JSON), and the policies for what the model sees of it.

Training is cheapest if each prompt extends the previous one: turns then merge into one sequence, and the server's
prefix cache hits. So the history is edited only when necessary, and then several screenshots are dropped at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import Json, mapping, sequence

DROPPED_IMAGE = "(old screenshot left out)"


HistoryPolicy = Literal["full", "block_drop", "last_n"]
"""full: keep everything; block_drop: drop old screenshots in blocks; last_n: show only the newest screenshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOldScreenshots:
    """Keeps at most `max_images` screenshots; when there is one more, the oldest `block` are dropped at once.

    So the prefix changes once in `block` turns instead of in every turn. Text, reasoning and calls are kept.
    """

    max_images: int = 8
    block: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.block <= self.max_images:
            raise ValueError(f"expected 1 <= block <= max_images, got block {self.block}, max_images {self.max_images}")

    def visible(self, items: Sequence[Json]) -> list[Json]:
        """The items of the next request, oldest first; an extension of the previous request if possible."""
        num_images = sum(part.get("type") == "input_image" for item in items for part in _parts(item))
        surplus = max(0, num_images - self.max_images)
        num_dropped = -(-surplus // self.block) * self.block
        kept: list[Json] = []
        for item in items:
            parts = _parts(item)
            shown: list[Json] = []
            for part in parts:
                is_dropped = num_dropped > 0 and part.get("type") == "input_image"
                num_dropped -= is_dropped
                shown.append({"type": "input_text", "text": DROPPED_IMAGE} if is_dropped else part)
            kept.append(item if shown == parts else {**item, _content_key(item): shown})
        return kept


def system_item(prompt: str) -> Json:
    return {"type": "message", "role": "system", "content": _content(prompt, None)}


def user_item(text: str, image_url: str | None = None) -> Json:
    """A message to the model, with a screenshot below the text if there is one."""
    return {"type": "message", "role": "user", "content": _content(text, image_url)}


def tool_result_item(call_id: str, text: str, image_url: str | None = None) -> Json:
    """The result of a tool call: an error message, a screenshot, or both."""
    return {"type": "function_call_output", "call_id": call_id, "output": _content(text, image_url)}


def _content(text: str, image_url: str | None) -> list[Json]:
    texts: list[Json] = [{"type": "input_text", "text": text}] if text else []
    images: list[Json] = [{"type": "input_image", "image_url": image_url, "detail": "auto"}] if image_url else []
    return texts + images


def make_history(policy: HistoryPolicy, *, max_images: int) -> DropOldScreenshots | None:
    """The history policy of this name, None to keep everything until the model's context is used up.

    Raises `ConfigError` if it needs more screenshots than it may keep.
    """
    smallest = {"full": 0, "last_n": 1, "block_drop": 2}[policy]
    if max_images < smallest:
        raise ConfigError(
            f"history_images: expected at least {smallest} with history={policy}, got {max_images}; "
            f"set history_images={smallest} or more"
        )
    match policy:
        case "full":
            return None
        case "last_n":
            return DropOldScreenshots(max_images=max_images, block=1)
        case "block_drop":
            return DropOldScreenshots(max_images=max_images, block=dropped_at_once(max_images))


def dropped_at_once(max_images: int) -> int:
    """How many of the kept screenshots `block_drop` drops: half; one would be `last_n`."""
    return max(2, max_images // 2)


def _parts(item: Json) -> list[Json]:
    return [mapping(part) for part in sequence(item.get(_content_key(item)))]


def _content_key(item: Json) -> str:
    return "output" if item.get("type") == "function_call_output" else "content"
