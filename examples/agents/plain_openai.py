"""A whole agent in the openai package's Responses API: `agent_command="python examples/agents/plain_openai.py"`."""

import os

import httpx
from openai import OpenAI

DEVICE = os.environ["CUA_DEVICE_URL"]
HEADERS = {"Authorization": f"Bearer {os.environ['CUA_DEVICE_TOKEN']}", "Content-Type": "application/json"}
device = httpx.Client(headers=HEADERS, timeout=300)
model = OpenAI(max_retries=0, timeout=None)  # reads OPENAI_BASE_URL and OPENAI_API_KEY


def screen(url: str) -> dict[str, str]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


about = device.get(DEVICE).raise_for_status().json()
first = device.get(f"{DEVICE}/screenshot?as=url").raise_for_status().json()
task = {"type": "input_text", "text": os.environ["CUA_INSTRUCTION"]}
items = [{"role": "system", "content": about["prompt"]}, {"role": "user", "content": [task, screen(first["url"])]}]

for _ in range(int(os.environ["CUA_MAX_TURNS"])):
    response = model.responses.create(model="policy", input=items, tools=[about["tool"]])
    items += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        items.append({"role": "user", "content": "Answer with one tool call."})
    for call in calls:
        reply = device.post(f"{DEVICE}/action", content=call.arguments).raise_for_status().json()
        if reply["finished"]:
            raise SystemExit
        said = [{"type": "input_text", "text": reply["error"]}] if reply["error"] else []
        result = [*said, screen(reply["screenshot"]["url"])]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
