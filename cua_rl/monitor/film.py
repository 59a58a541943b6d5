"""A rollout as an animated GIF or WebP: each turn's screenshot with its actions drawn on it, then the last one."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Literal

from PIL import Image, ImageDraw, ImageOps

from cua_rl.monitor import rollout_schemas as schemas
from cua_rl.monitor.databases import NotFoundError
from cua_rl.reporting.trace_folder import mark_action
from cua_rl.types.actions import Action, Click, Drag, Scroll
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.json_values import mapping, sequence

MAX_SIDE_PX = 640
MAX_FRAMES = 120
_TURN_MS, _END_MS = 1200, 3000
_STRIP_PX = 18
_FAR_PX = 1e6  # farther away nothing can be drawn

FilmKind = Literal["gif", "webp"]
_Frame = tuple[str, Sequence[Mapping[str, object]], str]
"""The hash of the screenshot, the actions on it, and the line below it."""


def make_film(rollout: schemas.Rollout, images: Mapping[str, EncodedImage], kind: FilmKind = "gif") -> bytes:
    """The film, at most `MAX_SIDE_PX` wide and high without its caption; of more than `MAX_FRAMES` screens every n-th.

    WebP keeps all colours. `images` are by hash, pruned ones grey. Raises `NotFoundError` if there is no screenshot.
    """
    frames = _frames(rollout)
    if not frames:
        raise NotFoundError(
            f"expected a rollout with screenshots, got {rollout.rollout_id!r} without; export it as HTML"
        )
    every = -(-(len(frames) - 1) // (MAX_FRAMES - 1)) or 1
    chosen = [*frames[:-1:every], frames[-1]]
    shown = [images.get(digest) for digest, _, _ in chosen]
    sizes = [(image.width_px, image.height_px) for image in shown if image is not None and image.width_px]
    scale = min(1.0, MAX_SIDE_PX / max((max(size) for size in sizes), default=MAX_SIDE_PX))
    canvas = tuple(max(1, round(scale * max((size[axis] for size in sizes), default=320))) for axis in (0, 1))
    pictures = (_draw(image, frame, scale, canvas) for image, frame in zip(shown, chosen, strict=True))
    first, out = next(pictures), BytesIO()
    durations = [_TURN_MS] * (len(chosen) - 1) + [_END_MS]
    first.save(out, kind, save_all=True, append_images=pictures, duration=durations, loop=0, lossless=True)
    return out.getvalue()


def _frames(rollout: schemas.Rollout) -> list[_Frame]:
    frames: list[_Frame] = []
    for turn in rollout.turns:
        actions = [] if turn.action is None else [turn.action, *map(mapping, sequence(turn.action.get("then")))]
        line = "; ".join(map(_line, actions)) or turn.failure_kind or "no action"
        if turn.before is not None:
            frames.append((turn.before.sha256, actions, f"{turn.turn_index + 1}/{len(rollout.turns)} {line}"))
    last = rollout.turns[-1].after if rollout.turns else None
    if last is not None:
        outcome = {True: "success", False: "failure", None: "no verdict"}[rollout.success]
        frames.append((last.sha256, (), f"{outcome}, {rollout.stop_reason or rollout.status}"))
    return frames


def _line(action: Mapping[str, object]) -> str:
    values = (str(value) for name, value in action.items() if name not in ("type", "then"))
    return " ".join((str(action.get("type")), *values))


def _draw(image: EncodedImage | None, frame: _Frame, scale: float, canvas: Sequence[int]) -> Image.Image:
    _, actions, line = frame
    picture = Image.new("RGB", (canvas[0], canvas[1] + _STRIP_PX), "white")
    screen = _screen(image, canvas)
    unit = max(screen.size) / 100
    pen = ImageDraw.Draw(screen)
    for action in actions:
        mark_action(pen, _aimed(action), radius_px=max(7, round(3 * unit)), line_px=max(2, round(0.8 * unit)))
    picture.paste(screen.resize([max(1, round(scale * side)) for side in screen.size]), (0, 0))
    text = line.encode("ascii", "backslashreplace").decode()  # what the font of Pillow can draw for certain
    ImageDraw.Draw(picture).text((3, canvas[1] + 2), text[:200].replace("\n", " "), fill="black", font_size=12)
    return picture


def _screen(image: EncodedImage | None, canvas: Sequence[int]) -> Image.Image:
    """The screenshot; a grey area for one that was pruned, or that its sender broke."""
    size = (canvas[0], canvas[1]) if image is None or not image.width_px else (image.width_px, image.height_px)
    try:
        with Image.open(BytesIO(b"" if image is None else image.data)) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, SyntaxError, ValueError):
        return Image.new("RGB", size, "#888888")


def _aimed(action: Mapping[str, object]) -> Action | None:
    """What is drawn of an action, whoever named its fields; None if it is aimed at nothing."""
    names = ("x", "y", "to_x", "to_y", "down_px", "right_px")
    values = ((name, action.get(name)) for name in names)
    given = {name: round(value) for name, value in values if isinstance(value, int | float) and abs(value) < _FAR_PX}
    if "x" not in given or "y" not in given:
        return None
    if "to_x" in given and "to_y" in given:
        return Drag(x=given["x"], y=given["y"], to_x=given["to_x"], to_y=given["to_y"])
    if action.get("type") == "Scroll":
        far = {name: given.get(name, 0) for name in ("down_px", "right_px")}
        return Scroll(x=given["x"], y=given["y"], **far)
    return Click(x=given["x"], y=given["y"])
