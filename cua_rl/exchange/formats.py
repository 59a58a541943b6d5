"""Reads GUI trajectories of others, with images beside or inside the files (`cua_rl.exchange.files`).

- ATIF, the Agent Trajectory Interchange Format of Harbor, version 1 (RFC 0001 of
  github.com/harbor-framework/harbor): `schema_version`, `steps` with `message`, `tool_calls` and `observation`.
- ADP, the Agent Data Protocol (arXiv:2510.24702, github.com/neulab/agent-data-protocol), to which AgentTrek and other
  data sets were converted: `content` with items of a `class_`.
- AndroidControl (arXiv:2406.03679, github.com/google-research/google-research/tree/master/android_control): the fields
  of its records, `goal`, `screenshots`, `actions` and `step_instructions`, as JSON; actions may be JSON in strings.
- Conversations of the APIs of OpenAI, Anthropic and Google (`cua_rl.exchange.provider_logs`).
- Data sets in the shapes of their publishers (`cua_rl.exchange.data_sets`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from cua_rl.environments.device import DeviceKind
from cua_rl.exchange.code_actions import parse_code
from cua_rl.exchange.data_sets import (
    read_agentnet,
    read_aguvis,
    read_android_in_the_wild,
    read_gui_odyssey,
    read_mind2web,
    read_osworld,
)
from cua_rl.exchange.files import find_files, is_conversation, read_values
from cua_rl.exchange.foreign_actions import WHEEL_CLICK_PX, ForeignAction, UnknownAction
from cua_rl.exchange.provider_logs import read_anthropic, read_gemini, read_openai
from cua_rl.exchange.recorder import ForeignTrajectory, Recorder
from cua_rl.exchange.rows import Row, as_row, as_rows, is_row
from cua_rl.exchange.tfrecords import find_element
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import is_array

Format = Literal[
    "atif", "adp", "android_control", "openai", "anthropic", "gemini", "aitw", "gui_odyssey", "agentnet", "aguvis",
    "mind2web", "osworld",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the user says where files do not."""

    format: Format | None = None
    device: DeviceKind | None = None
    display: tuple[int, int] | None = None
    """Size in whose pixels all coordinates are given."""
    wheel_click_px: float = WHEEL_CLICK_PX


def read_trajectories(path: Path, told: Told | None = None) -> Iterator[Callable[[], ForeignTrajectory]]:
    """The trajectories of a file or folder, each as a function that parses it; raises `ConfigError`."""
    files = find_files(path)
    told = told or Told()
    root = (path if path.is_dir() else path.parent).absolute()
    is_empty = True
    for file in files:
        folder = file.absolute().parent
        for where, value in read_values(file, root):
            is_empty = False
            yield partial(_parse, value, where, folder, root, told)
    if is_empty:
        raise ConfigError(f"path: expected at least one trajectory in {str(path)!r}, got none; correct path")


def _parse(value: object, where: str, folder: Path, root: Path, told: Told) -> ForeignTrajectory:
    kind = told.format or detect_format(value, where)
    recorder = Recorder(where=where, folder=folder, root=root, told_display=told.display)
    try:
        # of a conversation, the items alone will do
        value = {_ITEMS.get(kind, ""): value} if is_array(value) else value
        found = _READERS[kind](as_row(value), recorder)
    except UnknownAction as error:
        raise UnknownAction(f"{where}: {error}") from None
    except ConfigError:
        raise  # it says what it expected, and where
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"expected a trajectory in the format {kind} in {where}, got one without what is read from it "
            f"({type(error).__name__}: {error}); docs/trajectories.md shows the formats, format= names one"
        ) from None
    if not found.steps or not found.instruction:
        raise ConfigError(
            f"expected an instruction and steps with screenshots in {where}, got "
            f"{'an instruction' if found.instruction else 'none'} and {len(found.steps)} steps; import with "
            "unreadable=skip, which leaves such trajectories out"
        )
    device = told.device or found.kind
    if device is None or found.kind not in (None, device):
        raise ConfigError(
            f"device: expected the kind of device of {where}, which decides what our agent's actions are, got "
            f"{'a file that does not say it' if device is None else f'{device} for a file of {found.kind}'}; set "
            "device=android, device=linux (a desktop) or device=browser"
        )
    return replace(found, kind=device, wheel_click_px=told.wheel_click_px, format=kind)


def detect_format(value: object, where: str) -> Format:
    """The format of a trajectory by its keys; raises `ConfigError`."""
    fields: Row = value if is_row(value) else {}
    keys = fields.keys()
    if "steps" in keys and str(fields.get("schema_version", "")).startswith("ATIF-v1"):
        return "atif"
    for kind, needed in _KEYS_OF:
        if needed <= keys:
            return kind
    if is_conversation(value):
        if any("parts" in item for item in value):
            return "gemini"
        return "openai" if any("type" in item for item in value) else "anthropic"
    raise ConfigError(
        "expected a trajectory with schema_version ATIF-v1 and steps, or with the keys of another format ("
        f"{'; '.join(', '.join(sorted(needed)) for _, needed in _KEYS_OF)}) in {where}, got {sorted(keys) or value!r}; "
        "docs/trajectories.md has the shape of each"
    )


def _read_android_control(value: Row, recorder: Recorder) -> ForeignTrajectory:
    shots: Sequence[str] = value.get("screenshots") or value.get("screenshots_b64") or ()
    sizes = [[int(size) for size in value.get(f"screenshot_{side}s") or ()] for side in ("width", "height")]
    shown = list(zip(*sizes, strict=True)) or [None] * len(shots)
    actions = [_arguments(json.loads(one) if isinstance(one, str) else one) for one in value["actions"]]
    if len(shots) not in (len(actions), len(actions) + 1):
        raise ConfigError(
            f"expected a screenshot before each of the {len(actions)} actions in {recorder.where}, and perhaps one "
            f"after them, got {len(shots)}; import with unreadable=skip, which leaves such episodes out"
        )
    told = [*map(str, value.get("step_instructions") or ()), *[None] * len(shots)]
    trees: Sequence[object] = value.get("accessibility_trees") or [None] * len(shots)
    recorder.tell(_instruction(value["goal"]))
    for place, (shot, display) in enumerate(zip(shots, shown, strict=True)):
        recorder.see(shot, display=display)
        if place < len(actions):
            action, tree = actions[place], trees[place]
            name, is_at_point = str(action["action_type"]), {"x", "y"} <= action.keys()
            box = find_element(tree, action["x"], action["y"]) if is_at_point and isinstance(tree, str) else ()
            # the data set's own description of its actions: type clicks, types and presses enter, input_text only types
            enters: Row = {"press_enter": True} if name == "type" else {}
            recorder.act(ForeignAction(name=name, given=action | enters), thought=told[place], box=box)
    return recorder.finish(f"android_control/{value.get('episode_id', recorder.where)}", kind="android")


def _read_adp(value: Row, recorder: Recorder) -> ForeignTrajectory:
    for item in as_rows(value["content"]):
        shown = item if item["class_"] == "image_observation" else item.get("image_observation")
        thought = item.get("description") or item.get("reasoning_content")
        match item["class_"]:
            case "text_observation" if item.get("source") == "user":
                recorder.tell(_instruction(item["content"]))
            case "message_action":
                _read_adp_message(str(item["content"]), recorder, is_last=item is value["content"][-1])
            case "api_action":
                recorder.act(
                    ForeignAction(name=str(item["function"]), given=_arguments(item["kwargs"])), thought=thought
                )
            case "code_action":
                for action in parse_code(str(item["content"])):
                    recorder.act(action, thought=thought)
                    thought = None
            case _ if shown is not None:
                recorder.see(shown["content"], display=_size(item.get("viewport_size")))
            case str(kind) if kind.endswith("_observation"):
                pass  # text about the page is not what our agents see
            case kind:
                raise ValueError(f"expected actions and observations of ADP, got {kind!r}")
    details: Row = value.get("details") or {}
    kind = _kind_of(details.get("platform"))
    return recorder.finish(f"adp/{value['id']}", kind=kind, success=_success_of(details))


def _read_adp_message(text: str, recorder: Recorder, *, is_last: bool) -> None:
    if not recorder.instruction:
        recorder.tell(text)  # sets of phones have the goal as the agent's first message
    elif "</finish>" in text or is_last:
        recorder.act(ForeignAction(name="finish", given={}))
    else:
        recorder.think(text)


def _read_atif(value: Row, recorder: Recorder) -> ForeignTrajectory:
    for item in as_rows(value["steps"]):
        message, shown = _read_content(item.get("message") or "")
        calls = as_rows(item.get("tool_calls") or ())
        is_first = item["source"] == "agent" and not calls and not recorder.instruction
        if message and (item["source"] == "user" or is_first):
            recorder.tell(message)
        for source in shown:
            recorder.see(source)
        if item["source"] != "agent":
            continue
        extra: Row = item.get("extra") or {}
        thought = item.get("reasoning_content") or (None if is_first else message) or extra.get("description")
        for call in calls:
            given = _arguments(call["arguments"])
            read = ForeignAction(name=str(call["function_name"]), given=given)
            actions = parse_code(str(given["code"])) if given.keys() == {"code"} else [read]
            for action in actions:
                recorder.act(action, thought=thought, call_id=call.get("tool_call_id"))
                thought = None
        for result in as_rows(as_row(item.get("observation") or {}).get("results") or ()):
            for source in _read_content(result.get("content") or "")[1]:
                recorder.see(source, call_id=result.get("source_call_id"))
    extra = value.get("extra") or {}
    extra |= as_row(extra.get("adp_details") or {})
    name = value.get("session_id") or value.get("trajectory_id") or recorder.where
    kind = _kind_of(extra.get("platform"))
    return recorder.finish(f"atif/{name}", kind=kind, success=_success_of(extra))


def _read_content(content: object) -> tuple[str, list[object]]:
    """Text and images of a message or an observation."""
    if isinstance(content, str):
        return content, []
    parts = as_rows(content)
    texts = [str(part["text"]) for part in parts if part["type"] == "text"]
    return "\n".join(texts), [part["source"]["path"] for part in parts if part["type"] == "image"]


def _arguments(value: object) -> Row:
    if not is_row(value):
        raise TypeError(f"expected the arguments of an action as an object, got {value!r}")
    return value


def _instruction(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text as the instruction, got {value!r}")
    return value


def _size(value: Sequence[int] | None) -> tuple[int, int] | None:
    if not value:
        return None
    width, height = value
    return int(width), int(height)


def _kind_of(platform: object) -> DeviceKind | None:
    """The device that a file names; raises `ValueError` for a name that says nothing."""
    words: dict[str, DeviceKind] = {
        "android": "android",
        "mobile": "android",
        "phone": "android",
        "browser": "browser",
        "web": "browser",
    }
    words |= {"linux": "linux", "desktop": "linux", "ubuntu": "linux", "windows": "linux", "mac": "linux"}
    if platform is not None and str(platform).lower() not in words:
        raise ValueError(f"expected one of {', '.join(words)} as platform, got {platform!r}")
    return None if platform is None else words[str(platform).lower()]


def _success_of(details: Row) -> bool:
    told = next((details[key] for key in ("success", "is_success", "task_completed") if key in details), True)
    return told if isinstance(told, bool) else str(told).lower() not in ("false", "0", "failure", "failed")


_KEYS_OF: Sequence[tuple[Format, frozenset[str]]] = [
    ("adp", frozenset({"id", "content"})),
    ("android_control", frozenset({"goal", "actions"})),
    ("gui_odyssey", frozenset({"task_info", "steps"})),
    ("agentnet", frozenset({"task_id", "traj"})),
    ("aguvis", frozenset({"image", "conversations"})),
    # keys of one name come from read_values
    *((kind, frozenset({kind})) for kind in ("mind2web", "osworld", "aitw")),
    ("openai", frozenset({"input"})),
    ("openai", frozenset({"items"})),
    ("gemini", frozenset({"contents"})),
    ("anthropic", frozenset({"messages"})),
]
_ITEMS = {"openai": "items", "anthropic": "messages", "gemini": "contents"}
_READERS: dict[Format, Callable[[Row, Recorder], ForeignTrajectory]] = {
    "atif": _read_atif,
    "adp": _read_adp,
    "android_control": _read_android_control,
    "openai": read_openai,
    "anthropic": read_anthropic,
    "gemini": read_gemini,
    "aitw": read_android_in_the_wild,
    "gui_odyssey": read_gui_odyssey,
    "agentnet": read_agentnet,
    "aguvis": read_aguvis,
    "mind2web": read_mind2web,
    "osworld": read_osworld,
}
