"""The request to a judge: the record of an attempt and its screenshots as Chat Completions messages.

All text of the agent and the device is inside JSON strings, so that none of it can end the record.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import JudgeError
from cua_rl.types.rollout import StopReason, Turn

Screenshots = Literal["final", "all"]
Part = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An attempt at a task without the agent's reasoning, which is not evidence."""

    instruction: str
    turns: Sequence[Turn]
    answer: str | None
    stop_reason: StopReason
    item: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields of the task, for graders."""


def build_messages(prompt: str, case: Case, screenshots: Screenshots) -> list[Part]:
    """The system prompt, and the record with its screenshots; raises `JudgeError` if there is no screenshot."""
    if not case.turns:
        raise JudgeError("expected at least one turn, and a screenshot with it, for the judge to decide from, got none")
    turns: list[dict[str, object]] = []
    for turn in case.turns:
        actions = [{"type": type(action).__name__, **asdict(action)} for action in turn.agent.actions]
        told = {"told": turn.agent.action_error} if turn.agent.action_error is not None else {}
        turns.append({"turn": turn.index + 1, "actions": actions, **told})
    record = {"task": case.instruction, "turns": turns, "ended_by": str(case.stop_reason), "answer": case.answer}
    text = json.dumps(record, ensure_ascii=False, indent=1).encode("utf-8", "replace").decode()
    parts = [{"type": "text", "text": text}, *_screens(case.turns, screenshots)]
    return [{"role": "system", "content": prompt}, {"role": "user", "content": parts}]


def _screens(turns: Sequence[Turn], screenshots: Screenshots) -> Iterator[Part]:
    """Labelled screenshots; one that equals the previous one is not sent again."""
    shown: str | None = None
    for turn in turns if screenshots == "all" else ():
        before = turn.agent.before
        if before is None:
            continue
        if before.sha256 == shown:
            yield _text(f"Screenshot before turn {turn.index + 1}: the same.")
        else:
            yield from (_text(f"Screenshot before turn {turn.index + 1}:"), _image(before))
        shown = before.sha256
    last = turns[-1].agent.after or turns[-1].agent.before
    if last is None:
        return
    if last.sha256 == shown:
        yield _text("Final screenshot: the same.")
    else:
        yield from (_text("Final screenshot:"), _image(last))


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _image(shown: EncodedImage) -> Part:
    return {"type": "image_url", "image_url": {"url": shown.data_url()}}
