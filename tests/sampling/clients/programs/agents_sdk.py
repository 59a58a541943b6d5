"""OpenAI's Agents SDK and its computer tool, unmodified, whose computer is the device of the rollout."""

import os
from typing import Any

import agents
from device import Computer, Device


class SdkComputer(Computer, agents.Computer):
    """The SDK's computer; the name of the model chooses the tool, so it asks nothing of a display."""


if __name__ == "__main__":
    agents.set_tracing_disabled(True)
    device = Device()
    tool: Any = agents.ComputerTool(SdkComputer(device))
    operator = agents.Agent(name="operator", model="policy", tools=[tool])
    agents.Runner.run_sync(operator, device.instruction, max_turns=1 + int(os.environ["CUA_MAX_TURNS"]))
