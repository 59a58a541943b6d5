"""One BrowserGym task by screenshots and coordinates: the payload names `task`, such as "miniwob.click-color"."""

import base64
import faulthandler
import io
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

# for both browsers: the one of the chat ignores what the environment is told of the first
os.environ.setdefault("PLAYWRIGHT_BROWSERS_PATH", str(Path(sys.prefix) / "browsers"))
if miniwob := find_spec("miniwob"):  # of it the pages only
    os.environ.setdefault("MINIWOB_URL", f"{(Path(miniwob.origin or '').parent / 'html' / 'miniwob').as_uri()}/")

import browsergym.core
import browsergym.miniwob  # registers the tasks, as browsergym.webarena and others do
import gymnasium
from openai import OpenAI
from PIL import Image

STEP_LIMIT_S = float(os.environ.get("CUA_STEP_LIMIT_S", "60"))
NAMES = ["left_click", "double_click", "type", "key", "scroll"]
TOOL = {
    "type": "function",
    "name": "computer_use",
    "description": "Do one action with mouse or keyboard. Coordinates are [x, y], each 0 to 1000, origin top left.",
    "parameters": {
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": NAMES},
            "coordinate": {"type": "array", "items": {"type": "integer"}, "description": "where to click"},
            "text": {"type": "string", "description": "what to type"},
            "keys": {"type": "array", "items": {"type": "string"}, "description": "keys to press together"},
            "pixels": {"type": "number", "description": "how far to scroll, positive is down"},
        },
        "required": ["action"],
    },
}


@contextmanager
def watchdog() -> Generator[None]:
    """End the program with status 1 if the browser does not answer: calls of a dead driver never return."""
    faulthandler.dump_traceback_later(STEP_LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def code_of(arguments: str, width_px: int, height_px: int) -> str:
    """A call as BrowserGym's action; one that is none becomes an error that the model is shown."""
    try:
        given = json.loads(arguments)
        x, y = (float(place) / 1000 for place in given.get("coordinate", (0, 0)))
        match given["action"]:
            case "left_click" | "click":
                return f"mouse_click({x * width_px}, {y * height_px})"
            case "double_click":
                return f"mouse_dblclick({x * width_px}, {y * height_px})"
            case "type":
                return f"keyboard_type({str(given['text'])!r})"
            case "key":
                return f"keyboard_press({'+'.join(given['keys'])!r})"
            case "scroll":
                return f"scroll(0, {float(given['pixels'])})"
            case other:
                return f"unknown_action({other!r})"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"malformed_call({str(error)!r})"


def screen(pixels: object) -> dict[str, str]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}


def main() -> None:
    model, payload = OpenAI(max_retries=0, timeout=None), json.load(sys.stdin)
    actions = browsergym.core.action.highlevel.HighLevelActionSet(["coord"])
    with watchdog():
        environment = gymnasium.make(f"browsergym/{payload['task']}", action_mapping=actions.to_python_code)
        seen, _ = environment.reset(seed=int(os.environ["CUA_SEED"]))
    task = {"type": "input_text", "text": f"{seen['goal']}\nAnswer each screenshot with one computer_use call."}
    items = [{"role": "user", "content": [task, screen(seen["screenshot"])]}]
    reward, is_done, rejected, said = 0.0, False, 0, 0
    for _ in range(int(os.environ["CUA_MAX_TURNS"])):
        response = model.responses.create(model=os.environ["CUA_MODEL"], input=items, tools=[TOOL])
        items += response.output
        said += len(response.model_dump_json(include={"output"}))
        call = next((item for item in response.output if item.type == "function_call"), None)
        if call is None:
            rejected += 1
            items.append({"role": "user", "content": "Answer with one computer_use call."})
            continue
        height_px, width_px, _ = seen["screenshot"].shape
        with watchdog():
            seen, step_reward, is_done, _, _ = environment.step(code_of(call.arguments, width_px, height_px))
        reward, rejected = reward + step_reward, rejected + bool(seen["last_action_error"])
        if is_done:
            break
        error = [{"type": "input_text", "text": seen["last_action_error"]}] if seen["last_action_error"] else []
        output = [*error, screen(seen["screenshot"])]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    with watchdog():
        environment.close()
    shaped = reward + payload.get("brevity", 0.0) / (1 + said / 1000)  # ranks attempts that all fail
    result = {
        "reward": shaped,
        "success": reward > 0,
        "metrics": {"rejected_actions": rejected, "is_done": float(is_done)},
    }
    os.write(int(os.environ["CUA_RESULT_FD"]), json.dumps(result).encode())


if __name__ == "__main__":
    main()
