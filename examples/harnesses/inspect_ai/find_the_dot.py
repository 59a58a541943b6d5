"""A task with images: the agent sees a picture with a dot and clicks until it hits it; every click shows where it fell.

A hit scores 1; closeness goes from 1 on the dot to 0 in the far corner; shaped adds up to 0.1 for brevity, so that
attempts without a click differ, too.
"""

import base64
import io
import math
import random

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText
from inspect_ai.scorer import Score, Target, mean, scorer
from inspect_ai.solver import TaskState
from inspect_ai.tool import Tool, ToolError, tool
from inspect_ai.util import store
from PIL import Image, ImageDraw

SIZE_PX, RADIUS_PX = 196, 24


def picture(seed: int, clicks: list[tuple[float, float]]) -> ContentImage:
    image = Image.new("RGB", (SIZE_PX, SIZE_PX), "white")
    draw = ImageDraw.Draw(image)
    draw.circle(dot(seed), RADIUS_PX, fill="red")
    for x, y in clicks:
        draw.circle((x, y), 4, fill="black")
    file = io.BytesIO()
    image.save(file, "PNG")
    return ContentImage(image=f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")


def dot(seed: int) -> tuple[int, int]:
    place = random.Random(seed)
    return place.randrange(RADIUS_PX, SIZE_PX - RADIUS_PX), place.randrange(RADIUS_PX, SIZE_PX - RADIUS_PX)


@tool(name="mobile_use")  # its name and arguments are those that Qwen3-VL was trained on
def click(seed: int) -> Tool:
    async def execute(action: str, coordinate: list[int]) -> ContentImage:
        """Click on the picture, and see it again.

        Args:
            action: Always "click".
            coordinate: Where: x and y, each from 0 to 1000, origin top left.
        """
        if len(coordinate) != 2 or not all(0 <= place <= 1000 for place in coordinate):
            # shown to the model; any other exception would make a fault of the model's mistake
            raise ToolError(f"expected x and y from 0 to 1000, got {coordinate!r:.100}")
        x, y = coordinate
        clicks = [*store().get("clicks", []), (x * SIZE_PX / 1000, y * SIZE_PX / 1000)]
        store().set("clicks", clicks)
        return picture(seed, clicks)

    return execute


@scorer(metrics={"*": [mean()]})
def closest_click(seed: int):
    async def score(state: TaskState, target: Target) -> Score:
        clicks = store().get("clicks", [])
        nearest = min((math.dist(one, dot(seed)) for one in clicks), default=math.inf)
        closeness = max(0.0, 1 - nearest / (SIZE_PX * math.sqrt(2)))
        said = sum(len(message.model_dump_json()) for message in state.messages if message.role == "assistant")
        value = {"hit": float(nearest <= RADIUS_PX), "closeness": closeness}
        return Score(value=value | {"shaped": closeness + 0.1 / (1 + said / 1000)})

    return score


@task
def find_the_dot(seed: int = 0) -> Task:
    question = [ContentText(text="Click on the red dot, then submit."), picture(seed, [])]
    sample = Sample(id=seed, input=[ChatMessageUser(content=question)], target="hit")
    return Task(dataset=[sample], solver=react(tools=[click(seed)]), scorer=closest_click(seed))
