"""smolagents: its agent that calls tools, and its agent that writes code."""

import base64
import io
import os
import sys
from typing import Any

from PIL import Image
from smolagents import ActionStep, CodeAgent, OpenAIModel, ToolCallingAgent, tool
from world import SCREEN, TASK


@tool
def click(x: float, y: float) -> str:
    """Click.

    Args:
        x: Where.
        y: Where.
    """
    return "ok"


@tool
def type_text(text: str) -> str:
    """Type.

    Args:
        text: What.
    """
    return "ok"


@tool
def screenshot() -> str:
    """Look."""
    return "Here."


def show(step: ActionStep, agent: object) -> None:
    """Let the model see the screen after each step, as the vision example of smolagents does."""
    step.observations_images = [image.copy()]


style, _, streams = sys.argv[1].partition("_")
image: Any = Image.open(io.BytesIO(base64.b64decode(SCREEN.partition(",")[2])))
model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
make: Any = CodeAgent if style == "code" else ToolCallingAgent
agent = make(
    tools=[click, type_text, screenshot],
    model=model,
    verbosity_level=0,
    max_steps=12,
    step_callbacks=[show],
    stream_outputs=bool(streams),
)
agent.run(TASK, images=[image])
