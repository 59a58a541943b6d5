"""LangChain's computer-use agent (langgraph-cua), unmodified, whose virtual machine is the device of the rollout."""

import asyncio
from types import SimpleNamespace
from typing import Any

from device import Device
from langgraph_cua import create_cua, utils

device = Device(told=(1024, 768))  # what the agent declares, whatever the machine has


class Machine:
    """An instance of Scrapybara's client, as far as the agent uses one."""

    id = "machine"

    def get_stream_url(self) -> Any:
        return SimpleNamespace(stream_url="")

    def computer(self, *, action: str, **given: Any) -> Any:
        match action:
            case "click_mouse":
                name = "double_click" if given.get("num_clicks") == 2 else f"{given['button']}_click"
                device.act(name, given["coordinates"])
            case "drag_mouse":
                device.act("swipe", given["path"][0], given["path"][-1])
            case "press_key":
                device.keys(given["keys"])
            case "move_mouse":
                device.act("mouse_move", given["coordinates"])
            case "scroll":
                device.act("scroll", given["coordinates"], pixels=-20 * given["delta_y"])
            case "type_text":
                device.act("type", text=given["text"])
            case _:
                pass
        return SimpleNamespace(base_64_image=device.screenshot())


class Scrapybara:
    """The service's client."""

    def __init__(self, **_: object) -> None: ...

    def get(self, _: str) -> Machine:
        return Machine()

    start_browser = start_ubuntu = lambda self, **_: Machine()


if __name__ == "__main__":
    utils.Scrapybara = Scrapybara
    agent = create_cua(
        scrapybara_api_key="none", environment="web" if device.is_browser else "ubuntu", recursion_limit=1000
    )
    question = {"messages": [{"role": "user", "content": device.instruction}]}
    asyncio.run(agent.ainvoke(question))
