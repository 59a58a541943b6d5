"""Answers of checkpoints to a recorded turn: a table, JSON, and a picture of where they click."""

from collections import Counter
from collections.abc import Sequence
from colorsys import hsv_to_rgb
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from math import fsum
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cua_rl.reporting.plots import make_axes, save_figure
from cua_rl.reporting.trace_folder import mark_action
from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage

_NUM_SHOWN = 3  # kinds of answers of a checkpoint in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A recorded or sampled answer. What it asks for, in words, is `done`: the text if the agent cannot read it."""

    text: str
    done: str
    actions: tuple[Action, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAnswers:
    """A checkpoint's answers to a turn, and the log-probabilities that it gives the recorded one; `is_own`: its own."""

    name: str
    is_own: bool
    logprobs: tuple[float, ...]
    mean_abs_gap: float
    """From the recorded ones, nats."""
    samples: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTurn:
    """A recorded turn, counted from 1, and what checkpoints make of it; all log-probabilities are at `temperature`."""

    rollout_id: str
    turn: int
    policy_version: int
    temperature: float
    recorded: Answer
    checkpoints: Sequence[CheckpointAnswers]
    seen: EncodedImage | None

    @property
    def title(self) -> str:
        return f"turn {self.turn} of rollout {self.rollout_id}"

    def as_json(self) -> dict[str, Any]:
        """All of it but the screenshot."""
        checkpoints = [asdict(one) | {"samples": [*map(_plain, one.samples)]} for one in self.checkpoints]
        return asdict(replace(self, seen=None)) | {"recorded": _plain(self.recorded), "checkpoints": checkpoints}


def _plain(answer: Answer) -> dict[str, Any]:
    return asdict(answer) | {"actions": [{"type": type(each).__name__, **asdict(each)} for each in answer.actions]}


def print_asked(asked: AskedTurn) -> None:
    """Print what was recorded, and a row for each checkpoint."""
    recorded = asked.recorded
    title = f"{asked.title}: {recorded.done}, {fsum(recorded.logprobs):.4f} nats, {len(recorded.logprobs)} tokens"
    header = ("", "recorded answer, nats", "mean gap, nats", "does the same", "answers")
    table = Table(*header, title=Text(title), title_justify="left")
    for one in asked.checkpoints:
        done = Counter(sample.done for sample in one.samples)
        said = ", ".join(f"{count} {what}" for what, count in done.most_common(_NUM_SHOWN))
        same = f"{done[recorded.done]} of {len(one.samples)}"
        name = f"{one.name}, which sampled it" if one.is_own else one.name
        table.add_row(name, f"{fsum(one.logprobs):.4f}", f"{one.mean_abs_gap:.5f}", same, Text(said))
    Console(width=max(120, Console().width), markup=False).print(table)


def write_asked_plot(image_path: Path, asked: AskedTurn) -> None:
    """The screenshot with the clicks, beside the log-probabilities, a colour for each checkpoint."""
    titles, count = (asked.title, "log-probability of the recorded answer, nats"), len(asked.checkpoints)
    figure, (screen, curve) = make_axes(12, 7, titles, width_ratios=(3, 2))
    screen.axis("off")
    if asked.seen is not None:
        screen.imshow(draw_answers(asked.seen, asked))
    heights = [fsum(one.logprobs) for one in asked.checkpoints]
    curve.plot(range(count), heights, color="#888888", linewidth=1)
    curve.scatter(range(count), heights, c=[colour_of(place, count) for place in range(count)], zorder=2)
    curve.axhline(fsum(asked.recorded.logprobs), color="#000000", linewidth=1, linestyle=":")
    curve.set_xticks(range(count), [one.name for one in asked.checkpoints], rotation=45, ha="right")
    for place, label in enumerate(curve.get_xticklabels()):
        label.set_color(colour_of(place, count))
    save_figure(figure, image_path)


def draw_answers(seen: EncodedImage, asked: AskedTurn) -> Image.Image:
    """The screenshot with a ring where answers click: the recorded one in black, those of later checkpoints wider."""
    with Image.open(BytesIO(seen.data)) as screenshot:
        picture = screenshot.convert("RGB")
    pen, scale, count = ImageDraw.Draw(picture), max(1, max(picture.size) // 300), len(asked.checkpoints)
    for place, answers in enumerate([(asked.recorded,), *(one.samples for one in asked.checkpoints)]):
        colour = colour_of(place - 1, count) if place else "#000000"
        for action in [action for answer in answers for action in answer.actions]:
            mark_action(pen, action, colour, radius_px=(4 + 3 * place) * scale, line_px=2 * scale)
    return picture


def colour_of(index: int, count: int) -> str:
    """From blue to red, in the order of the checkpoints."""
    parts = hsv_to_rgb(0.62 * (1 - index / max(1, count - 1)), 0.95, 0.85)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
