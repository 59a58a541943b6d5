"""Small files of trajectories in every format that is read."""

import json
from base64 import b64encode
from io import BytesIO
from pathlib import Path

from PIL import Image

from cua_rl.exchange.formats import Told
from cua_rl.exchange.replayed import Replayed
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.types.actions import Action

WIDTH_PX, HEIGHT_PX = 192, 320
RENDERER = make_renderer(TINY_QWEN3_VL)
BROWSER, LINUX, ANDROID = Told(device="browser"), Told(device="linux"), Told(device="android")


def actions_of(made: Replayed) -> list[Action | None]:
    return [turn.agent.action for turn in made.record.rollout.turns]


def draw(number: int) -> bytes:
    """A screenshot that differs from every other one."""
    picture = Image.new("RGB", (WIDTH_PX, HEIGHT_PX), (255, 255, number % 256))
    picture.paste((10 * number % 256, 0, 0), (10, 10, 60, 60))
    data = BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()


def write_images(folder: Path, number: int) -> list[str]:
    """Screenshots in a folder of their own, by names relative to `folder`."""
    (folder / "shots").mkdir(parents=True, exist_ok=True)
    names = [f"shots/{place}.png" for place in range(number)]
    for place, name in enumerate(names):
        (folder / name).write_bytes(draw(place))
    return names


def write_android_control(folder: Path) -> Path:
    """Two episodes, one a line: one with image files, one with images in it."""
    names = write_images(folder, 6)
    first = {
        "episode_id": 7,
        "goal": "Turn on Wi-Fi.",
        "screenshots": names[:5],
        "step_instructions": ["Open Settings", "Click on Network", "Scroll down", "Click on Wi-Fi"],
        "actions": [
            {"action_type": "open_app", "app_name": "Settings"},
            {"action_type": "click", "x": 96, "y": 160},
            {"action_type": "scroll", "direction": "down"},
            {"action_type": "click", "x": 48, "y": 32},
        ],
    }
    second = {
        "episode_id": 8,
        "goal": "Search for tea.",
        "screenshots": [b64encode(draw(20 + place)).decode() for place in range(3)],
        "actions": [
            {"action_type": "long_press", "x": 10, "y": 20},
            {"action_type": "input_text", "text": "tea"},
            {"action_type": "navigate_back"},
        ],
    }
    path = folder / "episodes.jsonl"
    path.write_text(f"{json.dumps(first)}\n\n{json.dumps(second)}\n")
    return path


def adp(folder: Path) -> dict[str, object]:
    """Actions with coordinates, code of pyautogui, and a message at the end."""
    names = write_images(folder, 3)
    shown = [{"class_": "image_observation", "content": name, "source": "environment"} for name in names]
    web = {
        "class_": "web_observation",
        "html": None,
        "axtree": "button",
        "url": "http://a/",
        "image_observation": shown[1],
    }
    return {
        "id": "trek-1",
        "content": [
            {"class_": "text_observation", "content": "Book a flight.", "source": "user"},
            shown[0],
            {"class_": "message_action", "content": "I see a form."},
            {"class_": "api_action", "function": "mouse_click", "kwargs": {"x": 96, "y": 80}},
            web,
            {
                "class_": "code_action",
                "language": "python",
                "content": "pyautogui.click(x=0.5, y=0.25)\npyautogui.write('Rome')",
            },
            shown[2],
            {"class_": "message_action", "content": "<finish>Done.</finish>"},
        ],
        "details": {"success": True, "platform": "browser"},
    }


def atif(folder: Path) -> dict[str, object]:
    """Steps with tool calls and observations that hold images."""
    names = write_images(folder, 3)

    def image(name: str) -> dict[str, object]:
        return {"type": "image", "source": {"media_type": "image/png", "path": name}}

    def agent(step_id: int, call: dict[str, object], shown: str, **more: object) -> dict[str, object]:
        call = {"tool_call_id": f"c{step_id}", "function_name": "computer", "arguments": call}
        result = {"source_call_id": f"c{step_id}", "content": [image(shown)]}
        step = {"step_id": step_id, "source": "agent", "message": "", "tool_calls": [call]}
        return {**step, "observation": {"results": [result]}, **more}

    asked = [{"type": "text", "text": "Close the window."}, image(names[0])]
    return {
        "schema_version": "ATIF-v1.6",
        "session_id": "s1",
        "agent": {"name": "someone", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "system", "message": "You use a computer."},
            {"step_id": 2, "source": "user", "message": asked},
            agent(
                3, {"action": "left_click", "coordinate": [190, 2]}, names[1], reasoning_content="The cross closes it."
            ),
            agent(4, {"action": "key", "text": "", "keys": ["Return"]}, names[2]),
        ],
        "extra": {"platform": "linux"},
    }
