"""Readers for open formats of GUI trajectories, as JSON files with images beside or inside them.

- ATIF, the Agent Trajectory Interchange Format of Harbor, version 1 (RFC 0001 of
  github.com/harbor-framework/harbor): `schema_version`, `steps` with `message`, `tool_calls` and `observation`.
- ADP, the Agent Data Protocol (arXiv:2510.24702, github.com/neulab/agent-data-protocol), to which AgentTrek and other
  data sets were converted: `content` with items of a `class_`.
- AndroidControl (arXiv:2406.03679, github.com/google-research/google-research/tree/master/android_control): the fields
  of its records, `goal`, `screenshots`, `actions` and `step_instructions`, as JSON.

A file holds one trajectory, a list of them, or one on each line (.jsonl). Images are paths relative to their file,
base64, or `data:` URLs. A path must lead to a file below the imported folder, because the files are untrusted.
"""

import json
import os
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from cua_rl.conversation import EncodedImage
from cua_rl.devices.device import DeviceKind
from cua_rl.errors import ConfigError
from cua_rl.renderers.images import image_size
from cua_rl.renderers.request_error import RequestError
from cua_rl.trajectories.foreign_actions import OPENS_APP, ForeignAction, UnknownAction, parse_code
from cua_rl.trajectories.rows import Row

Format = Literal["atif", "adp", "android_control"]

_MAX_IMAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A screenshot, read on demand."""

    source: str
    """A path, base64, or a `data:` URL."""
    folder: Path
    """The folder that a path is relative to."""
    root: Path
    """The imported folder, which contains all images."""

    def load(self) -> EncodedImage:
        """The image; raises `ConfigError`."""
        try:
            data = self._read()
            width_px, height_px = image_size(data)
        except (OSError, ValueError, RequestError) as error:
            raise ConfigError(
                f"expected a PNG or JPEG image at {self.source[:200]!r}, relative to {str(self.folder)!r}, got "
                f"{error}; put the images where the file says"
            ) from None
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        return EncodedImage(data=data, format=kind, width_px=width_px, height_px=height_px)

    def _read(self) -> bytes:
        head, comma, tail = self.source.partition(",")
        if head.startswith("data:") and comma:
            return b64decode(tail, validate=True)
        # the beginnings of PNG and JPEG in base64
        if self.source.startswith(("iVBOR", "/9j/")) and len(self.source) > 200:
            return b64decode(self.source, validate=True)
        path = Path(os.path.normpath(self.folder / self.source))
        # without resolving links: caches of data sets link to files elsewhere
        if not path.is_relative_to(self.root):
            raise ValueError(f"a path that leaves {str(self.root)!r}")
        if not path.is_file() or path.stat().st_size > _MAX_IMAGE_BYTES:
            raise ValueError(f"no file, or one of more than {_MAX_IMAGE_BYTES} bytes")
        return path.read_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Images:
    """Makes the screens of one file."""

    folder: Path
    root: Path

    def screen(self, source: object) -> Screen:
        if not isinstance(source, str):
            raise TypeError(f"expected the path of an image or the image in base64, got {source!r}")
        return Screen(source=source, folder=self.folder, root=self.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStep:
    """One step: what the agent saw, its reasoning, and its action."""

    screen: Screen
    action: ForeignAction
    thought: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTrajectory:
    """A trajectory recorded by another system."""

    where: str
    """Path and position, for messages."""
    trajectory_id: str
    instruction: str
    steps: tuple[ForeignStep, ...]
    last_screen: Screen | None
    """The screen after the last step, if recorded."""
    kind: DeviceKind
    success: bool = True
    """Assumed true unless the file says otherwise, as in data sets of demonstrations."""


def read_trajectories(path: Path, given: Format | None = None) -> Iterator[Callable[[], ForeignTrajectory]]:
    """The trajectories of a file or folder, each as a function that parses it; raises `ConfigError`."""
    files = [path] if path.is_file() else sorted(file for kind in ("json", "jsonl") for file in path.rglob(f"*.{kind}"))
    if not files:
        raise ConfigError(f"path: expected a file or folder with trajectories, got {str(path)!r}; correct path")
    is_empty = True
    for file in files:
        for number, value in enumerate(_read_values(file), start=1):
            is_empty = False
            images = _Images(folder=file.absolute().parent, root=(path if path.is_dir() else path.parent).absolute())
            yield _Parser(value=value, where=f"{file}, trajectory {number}", images=images, given=given)
    if is_empty:
        raise ConfigError(f"path: expected at least one trajectory in {str(path)!r}, got none; correct path")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parser:
    value: object
    where: str
    images: _Images
    given: Format | None

    def __call__(self) -> ForeignTrajectory:
        kind = self.given or detect_format(self.value, self.where)
        parse = {"atif": _parse_atif, "adp": _parse_adp, "android_control": _parse_android_control}[kind]
        try:
            found = parse(cast("Row", self.value), self.where, self.images)
        except UnknownAction as error:
            raise UnknownAction(f"{self.where}: {error}") from None
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ConfigError(
                f"expected a trajectory in the format {kind} in {self.where}, got one without what it needs "
                f"({type(error).__name__}: {error}); correct it, or name its format"
            ) from None
        if not found.steps or not found.instruction:
            raise ConfigError(
                f"expected an instruction and steps with screenshots in {self.where}, got none; remove it"
            )
        return found


def _read_values(file: Path) -> Iterator[object]:
    place = str(file)
    try:
        if file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    place = f"{file}, line {number}"
                    if line.strip():
                        yield cast("object", json.loads(line))
            return
        content = cast("object", json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"expected JSON in {place!r}, got {error}; correct it") from None
    yield from cast("list[object]", content) if isinstance(content, list) else [content]


def detect_format(value: object, where: str) -> Format:
    """The format of a trajectory by its keys; raises `ConfigError`."""
    keys: set[str] = set(cast("Row", value)) if isinstance(value, dict) else set()
    if "steps" in keys and str(cast("Row", value).get("schema_version", "")).startswith("ATIF-v1"):
        return "atif"
    if {"id", "content"} <= keys:
        return "adp"
    if {"goal", "actions"} <= keys:
        return "android_control"
    raise ConfigError(
        "expected a trajectory with schema_version ATIF-v1 and steps, with id and content (ADP), or with goal and "
        f"actions (AndroidControl) in {where}, got {sorted(keys) or value!r}; convert it to one of these"
    )


def _parse_android_control(value: Row, where: str, images: _Images) -> ForeignTrajectory:
    shots: Sequence[str] = value.get("screenshots") or value.get("screenshots_b64") or ()
    screens = [images.screen(shot) for shot in shots]
    actions: Sequence[Row] = value["actions"]
    if len(screens) not in (len(actions), len(actions) + 1):
        raise ConfigError(
            f"expected a screenshot before each of the {len(actions)} actions in {where}, and perhaps one after them, "
            f"got {len(screens)}; correct it"
        )
    thoughts = [*map(str, value.get("step_instructions") or ()), *[None] * len(actions)]
    steps = [
        ForeignStep(
            screen=screen,
            action=ForeignAction(name=str(action["action_type"]), given=_arguments(action)),
            thought=thought,
        )
        for screen, action, thought in zip(screens, actions, thoughts, strict=False)
    ]
    return ForeignTrajectory(
        where=where,
        trajectory_id=f"android_control/{value.get('episode_id', where)}",
        instruction=_instruction(value["goal"]),
        steps=_without_app_starts(steps),
        last_screen=screens[-1] if len(screens) > len(actions) else None,
        kind="android",
    )


def _without_app_starts(steps: Sequence[ForeignStep]) -> tuple[ForeignStep, ...]:
    """Drop leading steps that open an app by name, which our tools cannot do: the task begins in the app."""
    first = next((place for place, step in enumerate(steps) if step.action.name not in OPENS_APP), len(steps))
    return tuple(steps[first:])


def _parse_adp(value: Row, where: str, images: _Images) -> ForeignTrajectory:
    instruction, screen, steps, thought = "", None, list[ForeignStep](), None
    is_seen_after = False
    for item in cast("Sequence[Row]", value["content"]):
        shown = item if item["class_"] == "image_observation" else item.get("image_observation")
        actions: list[ForeignAction] = []
        match item["class_"]:
            case "text_observation" if not instruction and item.get("source") == "user":
                instruction = _instruction(item["content"])
            case "message_action" if "</finish>" in str(item["content"]) or item is value["content"][-1]:
                actions = [ForeignAction(name="finish", given={})]
            case "message_action":
                thought = str(item["content"])
            case "api_action":
                actions = [ForeignAction(name=str(item["function"]), given=_arguments(item["kwargs"]))]
            case "code_action":
                actions = list(parse_code(str(item["content"])))
            case _ if shown is not None:
                screen, is_seen_after = images.screen(shown["content"]), True
            case _:
                pass  # what is written about the page is not what our agents see
        if actions and screen is None:
            raise ConfigError(f"expected a screenshot before the first action of {where}, got none; leave it out")
        for action in actions:
            told = item.get("description") or thought
            steps.append(ForeignStep(screen=cast("Screen", screen), action=action, thought=told))
            thought, is_seen_after = None, False
    details: Row = value.get("details") or {}
    return ForeignTrajectory(
        where=where,
        trajectory_id=f"adp/{value['id']}",
        instruction=instruction,
        steps=_without_app_starts(steps),
        last_screen=screen if is_seen_after else None,
        kind=_kind_of(details.get("platform")),
        success=_success_of(details),
    )


def _parse_atif(value: Row, where: str, images: _Images) -> ForeignTrajectory:
    instruction, screen, steps = "", None, list[ForeignStep]()
    is_seen_after = False
    for item in cast("Sequence[Row]", value["steps"]):
        message, shown = _read_content(item.get("message") or "", images)
        if item["source"] == "user" and not instruction:
            instruction = message
        if shown:
            screen = shown[-1]
        if item["source"] != "agent":
            continue
        for call in item.get("tool_calls") or ():
            if screen is None:
                raise ConfigError(f"expected a screenshot before the first action of {where}, got none; leave it out")
            action = ForeignAction(name=str(call["function_name"]), given=_arguments(call["arguments"]))
            thought = item.get("reasoning_content") or message or None
            steps.append(ForeignStep(screen=screen, action=action, thought=thought))
            is_seen_after = False
        observation: Row = item.get("observation") or {}
        results: Sequence[Row] = observation.get("results") or ()
        for result in results:
            _, shown = _read_content(result.get("content") or "", images)
            if shown:
                screen, is_seen_after = shown[-1], True
    extra: Row = value.get("extra") or {}
    return ForeignTrajectory(
        where=where,
        trajectory_id=f"atif/{value.get('session_id') or value.get('trajectory_id') or where}",
        instruction=instruction,
        steps=_without_app_starts(steps),
        last_screen=screen if is_seen_after else None,
        kind=_kind_of(extra.get("platform")),
        success=_success_of(extra),
    )


def _read_content(content: object, images: _Images) -> tuple[str, list[Screen]]:
    """Text and images of a message or an observation."""
    if isinstance(content, str):
        return content, []
    parts = cast("Sequence[Row]", content)
    texts = [str(part["text"]) for part in parts if part["type"] == "text"]
    return "\n".join(texts), [images.screen(part["source"]["path"]) for part in parts if part["type"] == "image"]


def _arguments(value: object) -> Row:
    if not isinstance(value, dict):
        raise TypeError(f"expected the arguments of an action as an object, got {value!r}")
    return cast("Row", value)


def _instruction(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text as the instruction, got {value!r}")
    return value


def _kind_of(platform: object) -> DeviceKind:
    words = {"android": "android", "mobile": "android", "phone": "android", "linux": "linux", "desktop": "linux"}
    return cast("DeviceKind", words.get(str(platform).lower(), "browser"))


def _success_of(details: Row) -> bool:
    told = details.get("success", details.get("is_success", True))
    return told if isinstance(told, bool) else str(told).lower() not in ("false", "0", "failure", "failed")
