"""One episode of an OpenEnv environment whose action is a text, such as echo's message or browsergym_env's action_str.

The payload names a `url` of a server that runs, or the app of a `server` to start (`module:app`), and perhaps `reset`
options; `text` and `image` are the fields of an observation that the model sees.
"""

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy
import requests
from openai import OpenAI
from openenv.core import GenericEnvClient
from PIL import Image


def start_server(app: str) -> str:
    """Start it on a free port; it ends with the rollout."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent), "--port", str(port), app]
    server = subprocess.Popen(argv, stdout=sys.stderr)
    while True:
        try:
            requests.get(f"http://127.0.0.1:{port}/health", timeout=10).raise_for_status()
            return f"http://127.0.0.1:{port}"
        except requests.RequestException:
            if server.poll() is not None:
                raise SystemExit(f"the server {app!r} ended with status {server.returncode}") from None
            time.sleep(0.1)


def content(observation: dict, payload: dict) -> list[dict]:
    shown: list[dict] = [{"type": "text", "text": str(observation.get(payload.get("text", "text"), ""))}]
    pixels = observation.get(payload.get("image", "screenshot"))
    if pixels is not None:  # nested lists of integers
        file = io.BytesIO()
        Image.fromarray(numpy.array(pixels, dtype=numpy.uint8)).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        shown.append({"type": "image_url", "image_url": {"url": url}})
    return shown


def main() -> None:
    payload, model = json.load(sys.stdin), OpenAI(max_retries=0, timeout=None)
    url = payload.get("url") or start_server(payload["server"])
    schema = requests.get(f"{url}/schema", timeout=30).json()["action"]
    (field,) = [name for name in schema["properties"] if name != "metadata"]
    reward, rejected, fault, messages = 0.0, 0, None, []
    with GenericEnvClient(base_url=url, message_timeout_s=60.0).sync() as environment:
        result = environment.reset(seed=int(os.environ["CUA_SEED"]), **payload.get("reset", {}))
        messages.append({"role": "user", "content": content(result.observation, payload)})
        for _ in range(int(os.environ["CUA_MAX_TURNS"])):
            answer = model.chat.completions.create(model=os.environ["CUA_MODEL"], messages=messages)
            text = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            try:
                result = environment.step({field: text})
            except RuntimeError as error:
                if "VALIDATION_ERROR" not in str(error):
                    raise  # the server's own failure, which ends as a fault
                rejected += 1
                messages.append({"role": "user", "content": str(error)})
                continue
            reward += result.reward or 0.0
            if result.observation.get("error"):  # environments turn what fails inside them into a reward of 0.0
                fault = {"kind": "environment", "message": str(result.observation["error"])}
            if result.done or fault:
                break
            messages.append({"role": "user", "content": content(result.observation, payload)})
    metrics = {"rejected_actions": rejected}
    os.write(
        int(os.environ["CUA_RESULT_FD"]), json.dumps({"reward": reward, "metrics": metrics, "fault": fault}).encode()
    )


if __name__ == "__main__":
    main()
