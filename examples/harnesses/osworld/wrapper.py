"""One OSWorld task by screenshots: the payload names its `config` (a file of evaluation_examples) and the `machine`."""

import base64
import json
import os
import sys
from pathlib import Path

from desktop_env.desktop_env import DesktopEnv
from openai import OpenAI

ACTIONS = ["left_click", "right_click", "double_click", "type", "key", "scroll", "wait", "terminate"]
PROPERTIES = {
    "action": {"type": "string", "enum": ACTIONS},
    "coordinate": {"type": "array", "items": {"type": "integer"}, "description": "x and y, each from 0 to 1000"},
    "text": {"type": "string", "description": "what to type"},
    "keys": {"type": "array", "items": {"type": "string"}, "description": "keys to press together"},
    "pixels": {"type": "number", "description": "how far to scroll, positive is up"},
    "status": {"type": "string", "enum": ["success", "failure"], "description": "how the task ended"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["action"]}
TOOL = {"type": "function", "name": "computer_use", "description": "Do one action.", "parameters": PARAMETERS}


def code_of(arguments: str, width_px: int, height_px: int) -> str:
    """A call as pyautogui's code, or one of OSWorld's own three actions; raises `ValueError` if it is none."""
    try:
        given = json.loads(arguments)
        x, y = (float(place) / 1000 for place in given.get("coordinate", (0, 0)))
        place = f"{round(x * width_px)}, {round(y * height_px)}"
        match given["action"]:
            case "left_click":
                return f"pyautogui.click({place})"
            case "right_click":
                return f"pyautogui.rightClick({place})"
            case "double_click":
                return f"pyautogui.doubleClick({place})"
            case "type":
                return f"pyautogui.typewrite({str(given['text'])!r}, interval=0.02)"
            case "key":
                return f"pyautogui.hotkey({', '.join(repr(str(key)) for key in given['keys'])})"
            case "scroll":
                return f"pyautogui.scroll({int(given['pixels'])})"
            case "wait":
                return "WAIT"
            case "terminate":
                return "DONE" if given["status"] == "success" else "FAIL"
            case other:
                raise ValueError(f"unknown action {other!r}")
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"malformed call: {error!r}") from None


def screen(png: bytes | None) -> dict[str, str]:
    """Raises `RuntimeError` without a picture: that is all that OSWorld shows of a machine that does not answer."""
    if not png:
        raise RuntimeError("expected a screenshot, got none")
    return {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}


def main() -> None:
    payload, model = json.load(sys.stdin), OpenAI(max_retries=0, timeout=None)
    config = json.loads(Path(payload["config"]).read_text(encoding="utf-8"))
    size = tuple(payload["machine"].get("screen_size", (1920, 1080)))
    options = payload["machine"] | {"screen_size": size, "cache_dir": os.environ["CUA_WORK_DIR"]}
    environment = DesktopEnv(**options, require_a11y_tree=False)
    try:
        seen = environment.reset(task_config=config)
        if config.get("config") and not environment.is_environment_used:  # a failed set-up is only logged
            raise RuntimeError("expected the task to be set up, it failed")
        question = [{"type": "input_text", "text": config["instruction"]}, screen(seen["screenshot"])]
        items: list = [{"role": "user", "content": question}]
        for _ in range(int(os.environ["CUA_MAX_TURNS"])):
            response = model.responses.create(model=os.environ["CUA_MODEL"], input=items, tools=[TOOL])
            items += response.output
            call = next((item for item in response.output if item.type == "function_call"), None)
            try:
                code = code_of(call.arguments if call else "null", *size)
            except ValueError as error:
                output = [{"type": "input_text", "text": str(error)}]
            else:
                seen, _, is_done, _ = environment.step(code, pause=payload.get("pause", 2))
                if is_done:
                    break
                output = [screen(seen["screenshot"])]
            reply = {"type": "function_call_output", "call_id": call.call_id} if call else {"role": "user"}
            items.append(reply | {"output" if call else "content": output})
        score = float(environment.evaluate())  # reads the machine, also if the turns were used up
        screen(environment.render())  # what cannot be read counts as 0 there, so see that the machine still answers
    finally:
        environment.close()
    os.write(int(os.environ["CUA_RESULT_FD"]), json.dumps({"reward": score, "success": score >= 1.0}).encode())


if __name__ == "__main__":
    main()
