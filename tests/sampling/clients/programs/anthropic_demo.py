"""Anthropic's computer-use demo (github.com/anthropics/anthropic-quickstarts, a checkout at `ANTHROPIC_QUICKSTARTS`).

The loop, `loop.py`, is unmodified; its computer tool has the demo's name, type and options, and acts on the device.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from device import Device

sys.path.insert(0, str(Path(os.environ["ANTHROPIC_QUICKSTARTS"]) / "computer-use-demo"))

from computer_use_demo import loop
from computer_use_demo.tools import groups
from computer_use_demo.tools.base import ToolResult
from computer_use_demo.tools.computer import ComputerTool20250124

VERSION = "computer_use_20250124"
device = Device()
os.environ |= {"WIDTH": str(device.size[0]), "HEIGHT": str(device.size[1])}


class Computer(ComputerTool20250124):
    """The demo's tool, which operates our device instead of an X display by programs."""

    _scaling_enabled = False

    async def __call__(self, *, action: str, **given: Any) -> ToolResult:
        at = given.get("coordinate")
        if action == "scroll":
            sign = 1 if given["scroll_direction"] == "up" else -1
            device.act("scroll", at, pixels=sign * 50 * given["scroll_amount"])
        elif action == "left_click_drag":
            device.act("swipe", given["start_coordinate"], at)
        elif action == "key":
            device.keys(given["text"].split("+"))
        elif action == "type":
            device.act("type", text=given["text"])
        elif action == "wait":
            device.act("wait", time=given["duration"])
        elif action != "screenshot":
            device.act({"triple_click": "double_click"}.get(action, action), at)
        return ToolResult(output="", base64_image=device.screenshot())


async def main() -> None:
    group = groups.TOOL_GROUPS_BY_VERSION[VERSION]
    tools = [Computer if issubclass(tool, ComputerTool20250124) else tool for tool in group.tools]
    loop.TOOL_GROUPS_BY_VERSION[VERSION] = groups.ToolGroup(version=VERSION, tools=tools, beta_flag=group.beta_flag)
    errors: list[Exception] = []

    def note(_request: object, _response: object, error: Exception | None) -> None:
        if error is not None:
            errors.append(error)

    await loop.sampling_loop(
        model="policy",
        provider=loop.APIProvider.ANTHROPIC,
        system_prompt_suffix="",
        messages=[{"role": "user", "content": device.instruction}],
        output_callback=lambda _: None,
        tool_output_callback=lambda *_: None,
        api_response_callback=note,
        api_key=os.environ["ANTHROPIC_API_KEY"],
        tool_version=VERSION,
    )
    if errors:
        raise errors[0]


if __name__ == "__main__":
    asyncio.run(main())
