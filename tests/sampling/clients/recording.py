"""Recorded conversations of client libraries with the gateway: what each sent, and what the model answered."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).with_name("recordings")


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
    api: Literal["chat", "responses"]
    turns: tuple[RecordedTurn, ...]


def save_recording(recording: Recording, path: Path) -> None:
    """Write a recording with each message, item and tool once: each request has all of the requests before it."""
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
    shared_lines, turn_lines = ",\n".join(shared), ",\n".join(turns)
    path.write_text(f'{{\n{head},\n"shared": [\n{shared_lines}\n],\n"turns": [\n{turn_lines}\n]\n}}\n')


def load_recording(path: Path) -> Recording:
    """Read what `save_recording` wrote."""
    read = json.loads(path.read_text())

    def whole(value: Any) -> Any:
        is_list = isinstance(value, dict) and set(value) == {"shared"}
        return [read["shared"][number] for number in value["shared"]] if is_list else value

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
