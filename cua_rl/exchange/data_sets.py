"""Reads data sets of GUI agents in the shapes in which their publishers ship them; docs/trajectories.md names these.

- GUI-Odyssey (arXiv:2406.08451): an episode is `device_info`, `task_info` and `steps`, coordinates from 0 to 1000.
- AgentNet of OpenCUA (arXiv:2508.09123): a line is `task_id`, `instruction` and `traj`, actions are pyautogui code.
- AGUVIS (arXiv:2412.04454): `image` and `conversations`; each step stands alone, its predecessors are in its text.
- Multimodal-Mind2Web (arXiv:2401.01614): a row is a step on a page of the web, with the box of its element.
- OSWorld (arXiv:2404.07972): a result folder; each screenshot shows what an action led to.
- Android in the Wild (arXiv:2307.10088): an example is a step, with the shares of the screen where a finger was.
"""

import json
from collections.abc import Mapping, Sequence

from cua_rl.exchange.code_actions import parse_code
from cua_rl.exchange.foreign_actions import ForeignAction
from cua_rl.exchange.recorder import ForeignTrajectory, Recorder
from cua_rl.exchange.rows import Row, as_row, as_rows
from cua_rl.exchange.tfrecords import raw_screenshot
from cua_rl.types.json_values import is_array, sequence

_ODYSSEY_KEYS = {"KEY_HOME": "home", "KEY_BACK": "back", "KEY_APPSELECT": "recents"}
_WILD_BUTTONS = {5: "back", 6: "home", 7: "enter"}
_OSWORLD_WORDS = ("WAIT", "DONE", "FAIL")
_OSWORLD_NAMES = {"typing": "type", "press": "press", "move_to": "moveto", "drag_to": "dragto"}
_PREVIOUS = "Previous actions:"


def read_gui_odyssey(value: Row, recorder: Recorder) -> ForeignTrajectory:
    """An episode; success is its last action (COMPLETE)."""
    recorder.display = (1000, 1000)
    recorder.tell(str(as_row(value["task_info"])["instruction"]))
    steps = as_rows(value["steps"])
    for step in steps:
        recorder.see(_in_folder(recorder, str(step["screenshot"]), "../screenshots"))
        action = _odyssey_action(str(step["action"]), step["info"])
        thought, box = step.get("low_level_instruction") or None, tuple(step.get("sam2_bbox") or ())
        recorder.act(action, thought=thought, box=box)
    success = bool(steps) and steps[-1]["action"] == "COMPLETE"
    return recorder.finish(f"gui_odyssey/{value['episode_id']}", kind="android", success=success)


def _odyssey_action(name: str, info: object) -> ForeignAction:
    """Raises `ValueError` for an action that the set does not have."""
    parts: Sequence[object] = sequence(info) if is_array(info) else (info,)
    match name, parts:
        case ("CLICK" | "LONG_PRESS", [str(key)]) if key in _ODYSSEY_KEYS:
            return ForeignAction(name="press", given={"keys": [_ODYSSEY_KEYS[key]]})
        case ("HOME" | "BACK" | "RECENT", _):
            return ForeignAction(name="press", given={"keys": [name.lower().replace("recent", "recents")]})
        case ("CLICK" | "LONG_PRESS", [point]):
            return ForeignAction(name=name.lower(), given={"coordinate": point})
        case ("SCROLL", [start, end]):
            return ForeignAction(name="swipe", given={"start_coordinate": start, "end_coordinate": end})
        case ("TEXT" | "TYPE", [str(text)]):
            return ForeignAction(name="type", given={"text": text})
        case ("COMPLETE" | "INCOMPLETE" | "IMPOSSIBLE", _):
            return ForeignAction(name="terminate", given={"status": "success" if name == "COMPLETE" else "failure"})
        case _:
            raise ValueError(f"expected an action of GUI-Odyssey, got {name!r} with {info!r}")


def read_agentnet(value: Row, recorder: Recorder) -> ForeignTrajectory:
    """A line; `task_completed` is what the publisher's check of the task says."""
    recorder.tell(str(value.get("instruction") or value["natural_language_task"]))
    for step in as_rows(value["traj"]):
        told = as_row(step["value"])
        recorder.see(_in_folder(recorder, str(step["image"]), "images"))
        _act_code(recorder, str(told["code"]), told.get("thought") or None)
    completed = value.get("task_completed", True)
    success = completed is True or str(completed).lower() == "true"
    return recorder.finish(f"agentnet/{value['task_id']}", kind="linux", success=success)


def read_aguvis(value: Row, recorder: Recorder) -> ForeignTrajectory:
    """One question about one picture; its text is the whole instruction, with the words for the actions before it."""
    place = f"{value['image']}/{value.get('question', 1)}"
    recorder.see(_in_folder(recorder, str(value["image"]), "images"))
    is_phone = False
    for message in as_rows(value["conversations"]):
        text = str(message["value"])
        match message["from"], message.get("recipient", "os"):
            case "human", _:
                recorder.tell(_aguvis_instruction(text))
            case "gpt", "os":
                is_phone = is_phone or "mobile." in text
                _act_code(recorder, text, None)
            case "gpt", _:
                recorder.think(text.strip())
            case _:
                pass  # the system prompt of its own agent
    return recorder.finish(f"aguvis/{place}", kind="android" if is_phone else None)


def _aguvis_instruction(text: str) -> str:
    text = text.replace("<image>", "").strip()
    asked, marker, before = text.rpartition(_PREVIOUS)
    if not marker:
        return text  # a question of the first stage
    asked = asked.rpartition("Instruction:")[2].strip()
    return asked if before.strip() in ("", "None") else f"{asked}\n\n{_PREVIOUS}\n{before.strip()}"


def read_mind2web(value: Row, recorder: Recorder) -> ForeignTrajectory:
    """The rows of one task; it ends before a step that the publisher has left out, or whose element has no box."""
    rows = sorted(as_rows(value["mind2web"]), key=lambda row: int(row["target_action_index"]))
    recorder.tell(str(rows[0]["confirmed_task"]))
    for place, row in enumerate(rows):
        recorder.see(row["screenshot"])
        box = _mind2web_box(row) if int(row["target_action_index"]) == place else ()
        operation = as_row(json.loads(row["operation"]))
        given: Row = {"coordinate": [sum(box[0::2]) / 2, sum(box[1::2]) / 2]}
        match operation.get("original_op") or operation["op"]:
            case _ if not box:
                name = "left_out"
            case "CLICK" | "HOVER" as kind:
                name = str(kind).lower()
            case "TYPE":
                name, given["text"] = "type", str(operation["value"])
            case "ENTER":
                name, given = "enter", {}
            case _:
                name = "select_option"
        recorder.act(ForeignAction(name=name, given=given), box=box)
    return recorder.finish(f"mind2web/{rows[0]['annotation_id']}", kind="browser")


def _mind2web_box(row: Row) -> tuple[float, ...]:
    """The element's left, top, right and bottom, in pixels of the page; empty if it has no box."""
    elements = [as_row(json.loads(one)) for one in row["pos_candidates"]]
    elements.sort(key=lambda one: not one.get("is_original_target"))
    for element in elements:
        attributes = as_row(json.loads(element["attributes"]))
        x, y, width, height = map(float, str(attributes["bounding_box_rect"]).split(","))
        if width > 0 and height > 0:
            return x, y, x + width, y + height
    return ()


def read_osworld(value: Row, recorder: Recorder) -> ForeignTrajectory:
    """A result folder; without a first screenshot, the actions before the first one that is there are left out."""
    recorder.tell(str(value["instruction"] or ""))
    if value["first"] is not None:
        recorder.see(value["first"])
    for line in as_rows(value["osworld"]):
        if "action" not in line:
            break  # what stopped its program
        if recorder.screen is None:
            recorder.num_unseen += 1
        else:
            said = line.get("response")
            thought = said.partition("```")[0].strip() if isinstance(said, str) else ""
            _act_osworld(recorder, line["action"], thought or None)
        recorder.see(line["screenshot_file"])
    success = value["result"] is not None and float(value["result"]) >= 1
    return recorder.finish(f"osworld/{value['id']}", kind="linux", success=success)


def _act_osworld(recorder: Recorder, action: object, thought: str | None) -> None:
    """An action in code, a word, or an object: of the action space computer_13, or code with what an agent adds."""
    if isinstance(action, str) and action in _OSWORLD_WORDS:
        action = {"action_type": action}
    if isinstance(action, str):
        _act_code(recorder, action, thought)
        return
    told = as_row(action)
    code = told.get("command") or told.get("action")
    if isinstance(code, str):
        _act_osworld(recorder, code, thought)
        return
    given, name = dict(as_row(told.get("parameters") or {})), str(told["action_type"])
    match name:
        case "DONE" | "FAIL":
            name, given = "terminate", {"status": "success" if name == "DONE" else "failure"}
        case "SCROLL":
            name, given = ("hscroll", given) if given.get("dx") else ("scroll", {"clicks": given.get("dy", 0)})
        case _:
            name = _OSWORLD_NAMES.get(name.lower(), name.lower())
    if "num_clicks" in given:
        given["clicks"] = given.pop("num_clicks")
    recorder.act(ForeignAction(name=name, given=given), thought=thought)


def read_android_in_the_wild(value: Row, recorder: Recorder) -> ForeignTrajectory:
    """The steps of one episode, which may have been shuffled."""
    steps = sorted(as_rows(value["aitw"]), key=lambda step: int(step["step_id"][0]))
    recorder.tell(_text(steps[0], "goal_info"))
    for step in steps:
        recorder.see(raw_screenshot(step))
        recorder.act(_wild_action(step))
    success = int(steps[-1]["results/action_type"][0]) == 10
    return recorder.finish(f"aitw/{_text(steps[0], 'episode_id')}", kind="android", success=success)


def _wild_action(step: Mapping[str, list[object]]) -> ForeignAction:
    """Raises `ValueError` for a number that is no action: google-research, android_in_the_wild/action_type.py."""
    match step["results/action_type"][0]:
        case 3:
            return ForeignAction(name="type", given={"text": _text(step, "results/type_action")})
        case 4:
            (y0, x0), (y1, x1) = step["results/yx_touch"], step["results/yx_lift"]
            return ForeignAction(name="touch_and_lift", given={"x0": x0, "y0": y0, "x1": x1, "y1": y1})
        case int(number) if number in _WILD_BUTTONS:
            return ForeignAction(name="press", given={"keys": [_WILD_BUTTONS[number]]})
        case 10 | 11 as number:
            return ForeignAction(name="terminate", given={"status": "success" if number == 10 else "failure"})
        case number:
            raise ValueError(f"expected a type of action of Android in the Wild, got {number!r}")


def _text(step: Mapping[str, list[object]], name: str) -> str:
    value = step[name][0]
    return value.decode() if isinstance(value, bytes) else str(value)


def _act_code(recorder: Recorder, code: str, thought: str | None) -> None:
    for action in parse_code(code):
        recorder.act(action, thought=thought)
        thought = None


def _in_folder(recorder: Recorder, name: str, folder: str) -> str:
    """An image where the file says, or in the folder that the publisher's archives unpack to."""
    return name if (recorder.folder / name).is_file() else f"{folder}/{name}"
