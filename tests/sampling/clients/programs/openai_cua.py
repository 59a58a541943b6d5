"""OpenAI's sample loop (github.com/openai/openai-cua-sample-app, a checkout at `OPENAI_CUA_SAMPLE_APP`), unmodified.

Its address of the API is fixed, so requests go elsewhere below it. Its computer is the device of the rollout; its own
computers need packages of cloud services, so the package that has them is left out.
"""

import os
import sys
from types import ModuleType
from typing import Any, Protocol

import requests
from device import Device

sys.path.insert(0, os.environ["OPENAI_CUA_SAMPLE_APP"])
_computers: Any = ModuleType("computers")
_computers.Computer = type("Computer", (Protocol,), {})
sys.modules["computers"] = _computers
_post = requests.post


def _post_to_us(url: str, **more: Any) -> Any:
    return _post(url.replace("https://api.openai.com/v1", os.environ["OPENAI_BASE_URL"]), **more)


requests.post = _post_to_us


class Computer:
    """The sample's protocol of a computer."""

    def __init__(self, device: Device) -> None:
        self.environment = "browser" if device.is_browser else "linux"
        self.dimensions = device.size
        self.screenshot = device.screenshot
        self._device = device

    def click(self, x: int, y: int, button: str = "left") -> None:
        self._device.act(f"{button}_click", (x, y))

    def double_click(self, x: int, y: int) -> None:
        self._device.act("double_click", (x, y))

    def scroll(self, x: int, y: int, scroll_x: int, scroll_y: int) -> None:
        self._device.act("scroll", (x, y), pixels=-scroll_y)

    def type(self, text: str) -> None:
        self._device.act("type", text=text)

    def wait(self, ms: int = 1000) -> None:
        self._device.act("wait", time=ms / 1000)

    def keypress(self, keys: list[str]) -> None:
        self._device.keys(keys)

    def move(self, x: int, y: int) -> None:
        self._device.act("mouse_move", (x, y))

    def drag(self, path: list[dict[str, int]]) -> None:
        self._device.act("swipe", (path[0]["x"], path[0]["y"]), (path[-1]["x"], path[-1]["y"]))

    def get_current_url(self) -> str:
        return "http://shop.example/"


if __name__ == "__main__":
    from agent.agent import Agent

    device = Device()
    agent = Agent(computer=Computer(device))  # type: ignore[arg-type]
    agent.run_full_turn([{"role": "user", "content": device.instruction}], print_steps=False)
