"""A folder per rollout for people: each turn's screenshot with the action drawn on it, and the text of the rollout.

    trace/step-000003/02-00-5f0c.../turn-01.png ... rollout.md

A thread writes turns as they are taken; training never waits for it.
"""

import asyncio
import logging
from io import BytesIO
from pathlib import Path
from typing import Self

from PIL import Image, ImageDraw

from cua_rl.events import Event, GroupEnded, Recorder, RolloutStarted, TurnTaken
from cua_rl.host.masking import printable
from cua_rl.types.actions import Action, Click, DoubleClick, Drag, LongPress, MoveMouse, RightClick, Scroll
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import CuaError, boundary, writing
from cua_rl.types.rollout import Rollout, Turn

logger = logging.getLogger(__name__)

_QUEUE_SIZE = 4096
_COLOUR = "#d6336c"
_STRIP_PX = 16


class TraceRecorder:
    """A `Recorder` that passes events to another one and writes rollouts into `folder`; an async context manager."""

    def __init__(self, inner: Recorder, folder: Path) -> None:
        self._inner = inner
        self._folder = folder
        self._rollouts: dict[str, Path] = {}
        self._queue: asyncio.Queue[Event] = asyncio.Queue(_QUEUE_SIZE)
        self._has_failed = False

    async def record(self, event: Event) -> None:
        """Pass the event on, and queue its turns and rollouts for writing."""
        await self._inner.record(event)
        if isinstance(event, RolloutStarted | TurnTaken | GroupEnded) and not self._has_failed:
            await self._queue.put(event)

    async def flush(self) -> None:
        """Wait until the other recorder has everything, and everything is written."""
        await self._inner.flush()
        await self._queue.join()

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write_forever(), name="write-traces")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._queue.join()
        self._writer.cancel()
        await asyncio.wait([self._writer])

    async def _write_forever(self) -> None:
        while True:
            event = await self._queue.get()
            try:
                if not self._has_failed:
                    with boundary(CuaError, "write a trace"), writing(self._folder):
                        await asyncio.to_thread(self._write, event)
            except CuaError as error:
                self._has_failed = True
                logger.warning("traces end here, training continues: %s", error)
            finally:
                self._queue.task_done()

    def _write(self, event: Event) -> None:
        match event:
            case RolloutStarted():
                step = f"{event.source.phase}-{event.source.step:06d}"
                name = f"{event.group_index:02d}-{event.member_index:02d}-{event.rollout_id}"
                folder = self._folder / step / name
                folder.mkdir(parents=True, exist_ok=True)
                self._rollouts[event.rollout_id] = folder
                head = f"# {event.task.task_id}, seed {event.task.seed}\n\n{event.task.instruction}\n\n"
                _append(folder, f"{head}device: {event.device_id}\n")
            case TurnTaken() if event.rollout_id in self._rollouts:
                _write_turn(self._rollouts[event.rollout_id], event.turn)
            case GroupEnded():
                ids = [rollout.rollout_id for rollout in event.group.compared]
                advantages = dict(zip(ids, event.advantages or (), strict=False))
                for rollout in (*event.group.rollouts, *event.group.faulty):
                    begun = self._rollouts.pop(rollout.rollout_id, None)
                    if begun is not None:
                        _append(begun, _ending(rollout, advantages.get(rollout.rollout_id)))
            case _:
                pass


def draw_action(seen: EncodedImage, action: Action | None) -> Image.Image:
    """The screenshot with a mark where the action is aimed at, and below it a strip that says what it was."""
    with Image.open(BytesIO(seen.data)) as screenshot:
        size = (screenshot.width, screenshot.height + _STRIP_PX)
        picture = Image.new("RGB", size, "white")
        picture.paste(screenshot.convert("RGB"))
    pen = ImageDraw.Draw(picture)
    mark_action(pen, action)
    caption = "no action" if action is None else repr(action)
    pen.text((2, size[1] - _STRIP_PX + 2), caption.encode("ascii", "backslashreplace").decode(), fill="black")
    return picture


def mark_action(
    pen: ImageDraw.ImageDraw, action: Action | None, colour: str = _COLOUR, *, radius_px: int = 7, line_px: int = 2
) -> None:
    """Draw where an action is aimed at, if it is aimed at something."""

    def ring(x: int, y: int, radius_px: int) -> None:
        corners = (x - radius_px, y - radius_px, x + radius_px, y + radius_px)
        pen.ellipse(corners, outline=colour, width=line_px)
        pen.point((x, y), fill=colour)

    match action:
        case Drag(x=x, y=y, to_x=to_x, to_y=to_y):
            pen.line((x, y, to_x, to_y), fill=colour, width=line_px)
            ring(to_x, to_y, radius_px // 2)
        case Scroll(x=x, y=y, down_px=down_px, right_px=right_px):
            pen.line((x, y, x + right_px, y + down_px), fill=colour, width=line_px)
            ring(x, y, radius_px // 2)
        case Click(x=x, y=y) | DoubleClick(x=x, y=y) | RightClick(x=x, y=y) | MoveMouse(x=x, y=y) | LongPress(x=x, y=y):
            ring(x, y, radius_px)
        case _:
            pass


def _write_turn(folder: Path, turn: Turn) -> None:
    lines = [f"\n## Turn {turn.index + 1}\n"]
    if turn.agent.before is not None:
        name = f"turn-{turn.index + 1:02d}.png"
        draw_action(turn.agent.before, turn.agent.action).save(folder / name)
        lines.append(f"![screenshot]({name})\n")
    done = [repr(action) for action in turn.agent.actions]
    lines.append(f"```\n{turn.model.text}\n```\n")
    lines += [f"done: {action}\n" for action in done]
    if turn.agent.action_error is not None:
        lines.append(f"told: {turn.agent.action_error}\n")
    _append(folder, "\n".join(lines))


def _ending(rollout: Rollout, advantage: float | None) -> str:
    facts: dict[str, object] = {"stop": rollout.stop_reason, "answer": rollout.answer, "error": rollout.error}
    if rollout.validation is not None:
        seen = rollout.validation
        facts["validation"] = f"{seen.query} was {seen.actual!r}, expected {seen.expected!r}: {seen.success}"
    facts |= {"reward": None if rollout.reward is None else rollout.reward.total, "advantage": advantage}
    return "\n## End\n\n" + "".join(f"{name}: {value}\n" for name, value in facts.items() if value is not None)


def _append(folder: Path, text: str) -> None:
    with (folder / "rollout.md").open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(printable(text))  # model and agent wrote it, people look at it in a terminal
