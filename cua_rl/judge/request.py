"""What a judge is asked: the record of an attempt and its screenshots, as one Chat Completions request.

Everything that came from the agent or the device is inside JSON strings, so nothing in it can end the record.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from cua_rl.actions import Action
from cua_rl.conversation import EncodedImage
from cua_rl.errors import JudgeError
from cua_rl.types import StopReason, Turn

Screenshots = Literal["final", "all"]
Part = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attempt at a task, as a judge gets it. The agent's thoughts are left out: they are no evidence."""

    instruction: str
    turns: Sequence[Turn]
    answer: str | None
    stop_reason: StopReason


def build_messages(prompt: str, case: Case, screenshots: Screenshots) -> list[Part]:
    """System prompt, then record and screenshots as one user message.

    Raises:
        JudgeError: there is no screenshot to decide from.
    """
    if not case.turns:
        raise JudgeError("expected at least one turn, and a screenshot with it, for the judge to decide from, got none")
    record = {
        "task": case.instruction,
        "turns": [_turn(turn) for turn in case.turns],
        "ended_by": str(case.stop_reason),
        "answer": case.answer,
    }
    text = json.dumps(record, ensure_ascii=False, indent=1).encode("utf-8", "replace").decode()
    parts = [{"type": "text", "text": text}, *_screens(case.turns, screenshots)]
    return [{"role": "system", "content": prompt}, {"role": "user", "content": parts}]


def _turn(turn: Turn) -> dict[str, object]:
    actions = [_action(action) for action in turn.agent.actions]
    told = {"told": turn.agent.action_error} if turn.agent.action_error is not None else {}
    return {"turn": turn.index + 1, "actions": actions, **told}


def _action(action: Action) -> dict[str, object]:
    return {"type": type(action).__name__, **asdict(action)}


def _screens(turns: Sequence[Turn], screenshots: Screenshots) -> Iterator[Part]:
    """Labelled screenshots; one that shows what the last one showed is not sent again."""
    shown: str | None = None
    for turn in turns if screenshots == "all" else ():
        if turn.agent.before.sha256 == shown:
            yield _text(f"Screenshot before turn {turn.index + 1}: the same.")
        else:
            yield from (_text(f"Screenshot before turn {turn.index + 1}:"), _image(turn.agent.before))
        shown = turn.agent.before.sha256
    last = turns[-1].agent.after or turns[-1].agent.before
    if last.sha256 == shown:
        yield _text("Final screenshot: the same.")
    else:
        yield from (_text("Final screenshot:"), _image(last))


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _image(shown: EncodedImage) -> Part:
    return {"type": "image_url", "image_url": {"url": shown.data_url()}}
