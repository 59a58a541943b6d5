"""Recorded conversations of client libraries with the gateway: what each sent, and what the model answered."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).with_name("recordings")
_PICTURE = re.compile(r"[A-Za-z0-9+/=]{1000,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A request, the answer that it got, and the ids in that answer: of the response, then of its tool calls."""

    request: Mapping[str, Any]
    answer: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A whole conversation of a client."""

    packages: tuple[str, ...]
    """With versions, as pip or npm install them."""
    api: Literal["chat", "responses", "messages"]
    turns: tuple[RecordedTurn, ...]


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording with each message, item, tool and picture once: each request has all of those before it."""
    shared: dict[str, int] = {}

    def number(entry: object) -> int:
        return shared.setdefault(json.dumps(entry, ensure_ascii=False), len(shared))

    turns = [
        json.dumps(
            {
                "answer": turn.answer,
                "ids": turn.ids,
                "request": {
                    name: {"shared": [number(entry) for entry in value]} if isinstance(value, list) else value
                    for name, value in turn.request.items()
                },
            },
            ensure_ascii=False,
        )
        for turn in recording.turns
    ]
    head = f'"packages": {json.dumps(recording.packages)},\n"api": "{recording.api}"'
    pictures: dict[str, int] = {}

    def refer(found: re.Match[str]) -> str:
        return f"@{pictures.setdefault(found[0], len(pictures))}@"

    shared_lines = _PICTURE.sub(refer, ",\n".join(shared))
    turn_lines, listed = ",\n".join(turns), ",\n".join(f'"{picture}"' for picture in pictures)
    parts = (head, f'"pictures": [\n{listed}\n]', f'"shared": [\n{shared_lines}\n]', f'"turns": [\n{turn_lines}\n]')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def load_recording(path: Path) -> Recording:
    """Read what `save_recording` wrote."""
    read = json.loads(path.read_text())
    pictures = read.get("pictures", [])
    shared = json.loads(re.sub(r"@(\d+)@", lambda found: pictures[int(found[1])], json.dumps(read["shared"])))

    def whole(value: Any) -> Any:
        is_list = isinstance(value, dict) and set(value) == {"shared"}
        return [shared[number] for number in value["shared"]] if is_list else value

    return Recording(
        packages=tuple(read["packages"]),
        api=read["api"],
        turns=tuple(
            RecordedTurn(
                request={name: whole(value) for name, value in turn["request"].items()},
                answer=turn["answer"],
                ids=tuple(turn["ids"]),
            )
            for turn in read["turns"]
        ),
    )
