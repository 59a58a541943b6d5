"""OpenAI's sample loop (github.com/openai/openai-cua-sample-app, a checkout at `OPENAI_CUA_SAMPLE_APP`), unmodified.

Its address of the API is fixed, so requests go elsewhere below it. Its computer is the device of the rollout; its own
computers need packages of cloud services, so the package that has them is left out.
"""

import os
import sys
from types import ModuleType
from typing import Any, Protocol

import requests
from device import Computer, Device

sys.path.insert(0, os.environ["OPENAI_CUA_SAMPLE_APP"])
_computers: Any = ModuleType("computers")
_computers.Computer = type("Computer", (Protocol,), {})
sys.modules["computers"] = _computers
_post = requests.post


def _post_to_us(url: str, **more: Any) -> Any:
    return _post(url.replace("https://api.openai.com/v1", os.environ["OPENAI_BASE_URL"]), **more)


requests.post = _post_to_us


class SampleComputer(Computer):
    """With what the sample's protocol of a computer has beside actions."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.environment = "browser" if device.is_browser else "linux"
        self.dimensions = device.size

    def get_current_url(self) -> str:
        return "http://shop.example/"


if __name__ == "__main__":
    from agent.agent import Agent

    device = Device()
    agent = Agent(computer=SampleComputer(device))  # type: ignore[arg-type]
    agent.run_full_turn([{"role": "user", "content": device.instruction}], print_steps=False)
