"""One episode of a Gymnasium environment, seen as the pixels that it renders.

The payload names `id` (`module:Name-v0` imports a module first), `options` of it, `success` (the reward from which on
an episode succeeded) and, where actions are numbered, a name for each: the model calls `mobile_use` with one of them,
otherwise with a click at a place from 0 to 1000.
"""

import base64
import io
import json
import os
import sys

import gymnasium
import numpy
from openai import OpenAI
from PIL import Image

POINT = {"type": "array", "items": {"type": "integer"}, "description": "x and y, each from 0 to 1000, origin top left"}


def tool(names: list[str]) -> dict:
    """In the format that Qwen3-VL was trained on."""
    properties = {"action": {"type": "string", "enum": names or ["click"]}} | ({} if names else {"coordinate": POINT})
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "name": "mobile_use", "description": "Act in the picture.", "parameters": parameters}


def screen(environment: gymnasium.Env) -> dict:
    file = io.BytesIO()
    Image.fromarray(environment.render()).save(file, "PNG")
    return {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}


def action_of(arguments: str, names: list[str]) -> object:
    """Raises `ValueError` if it is none."""
    try:
        given = json.loads(arguments)
        if names:
            return names.index(given["action"])
        place = numpy.array(given["coordinate"], dtype=numpy.float32) / 1000
        if place.shape != (2,) or not numpy.isfinite(place).all():
            raise ValueError(f"expected x and y, got {given['coordinate']!r:.100}")
        return numpy.clip(place, 0.0, 1.0)
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"malformed call: {error!r}") from None


def main() -> None:
    payload, model = json.load(sys.stdin), OpenAI(max_retries=0, timeout=None)
    names = payload.get("actions", [])
    environment = gymnasium.make(payload["id"], render_mode="rgb_array", **payload.get("options", {}))
    environment.reset(seed=int(os.environ["CUA_SEED"]))
    question = [{"type": "input_text", "text": os.environ["CUA_INSTRUCTION"]}, screen(environment)]
    items: list = [{"role": "user", "content": question}]
    reward, rejected, said, info = 0.0, 0, 0, {}
    for _ in range(int(os.environ["CUA_MAX_TURNS"])):
        response = model.responses.create(model=os.environ["CUA_MODEL"], input=items, tools=[tool(names)])
        items += response.output
        said += len(response.model_dump_json(include={"output"}))
        call = next((item for item in response.output if item.type == "function_call"), None)
        try:
            action = action_of(call.arguments if call else "null", names)
        except ValueError as error:
            rejected += 1
            output = [{"type": "input_text", "text": str(error)}]
        else:
            _, step_reward, terminated, truncated, info = environment.step(action)
            reward += float(step_reward)
            if terminated or truncated:
                break
            output = [screen(environment)]
        reply = {"type": "function_call_output", "call_id": call.call_id} if call else {"role": "user"}
        items.append(reply | {"output" if call else "content": output})
    environment.close()
    metrics = {name: value for name, value in info.items() if isinstance(value, float)} | {"rejected": rejected}
    shaped = reward + payload.get("brevity", 0.0) / (1 + said / 1000)  # ranks attempts that all fail
    result = {"reward": shaped, "success": reward >= payload.get("success", 1.0), "metrics": metrics}
    os.write(int(os.environ["CUA_RESULT_FD"]), json.dumps(result).encode())


if __name__ == "__main__":
    main()
