"""An agent of the OpenAI Agents SDK (pip install openai-agents), unaware that it is being trained:
`agent_command="python examples/agents/openai_agents_sdk.py"`.
"""

import os
from contextlib import suppress
from typing import Any

import httpx
from agents import Agent, FunctionTool, Runner, ToolOutputImage, ToolOutputText, set_tracing_disabled
from agents.agent import ToolsToFinalOutputResult
from agents.exceptions import MaxTurnsExceeded

DEVICE = os.environ["CUA_DEVICE_URL"]
HEADERS = {"Authorization": f"Bearer {os.environ['CUA_DEVICE_TOKEN']}", "Content-Type": "application/json"}
about = httpx.get(DEVICE, headers=HEADERS).raise_for_status().json()
is_finished = False


async def operate(context: object, arguments: str) -> Any:
    """Hand the model's call to the device, and what it shows then to the model."""
    global is_finished
    async with httpx.AsyncClient(headers=HEADERS, timeout=300) as device:
        reply = (await device.post(f"{DEVICE}/action", content=arguments)).raise_for_status().json()
    is_finished = reply["finished"]
    said = [ToolOutputText(text=reply["error"])] if reply["error"] else []
    return [*said, ToolOutputImage(image_url=reply["screenshot"]["url"], detail="auto")]


set_tracing_disabled(True)
operator = Agent(
    name="operator",
    instructions=about["prompt"],
    model="policy",
    tools=[
        FunctionTool(
            name=about["tool"]["name"],
            description=about["tool"]["description"],
            params_json_schema=about["tool"]["parameters"],
            on_invoke_tool=operate,
            strict_json_schema=False,
        )
    ],
    tool_use_behavior=lambda context, results: ToolsToFinalOutputResult(is_final_output=is_finished, final_output=""),
)
first = httpx.get(f"{DEVICE}/screenshot?as=url", headers=HEADERS, timeout=300).raise_for_status().json()
task = [
    {"type": "input_text", "text": os.environ["CUA_INSTRUCTION"]},
    {"type": "input_image", "image_url": first["url"], "detail": "auto"},
]
with suppress(MaxTurnsExceeded):
    Runner.run_sync(operator, [{"role": "user", "content": task}], max_turns=int(os.environ["CUA_MAX_TURNS"]))
