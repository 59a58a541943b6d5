"""A Gymnasium environment of pixels: click on a dot. The reward of a click is how close it comes, and 1 for a hit."""

import math
from typing import Any, ClassVar

import gymnasium
import numpy
from PIL import Image, ImageDraw

SIZE_PX, RADIUS_PX = 196, 24


class DotEnvironment(gymnasium.Env[Any, Any]):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 1}
    observation_space = gymnasium.spaces.Box(0, 255, (SIZE_PX, SIZE_PX, 3), numpy.uint8)
    action_space = gymnasium.spaces.Box(0.0, 1.0, (2,))

    def __init__(self, render_mode: str = "rgb_array") -> None:
        self.render_mode, self.dot = render_mode, numpy.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.dot = self.np_random.integers(RADIUS_PX, SIZE_PX - RADIUS_PX, 2)
        return self.render(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        distance = math.dist(action * SIZE_PX, self.dot)
        is_hit = distance <= RADIUS_PX
        reward = 1.0 if is_hit else 0.5 * (1 - distance / (SIZE_PX * math.sqrt(2)))
        return self.render(), reward, True, False, {"is_hit": float(is_hit)}

    def render(self) -> Any:
        image = Image.new("RGB", (SIZE_PX, SIZE_PX), "white")
        ImageDraw.Draw(image).circle(tuple(self.dot), RADIUS_PX, fill="red")
        return numpy.array(image)


gymnasium.register("Dot-v0", DotEnvironment)
