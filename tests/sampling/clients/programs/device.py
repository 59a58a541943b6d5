"""The device of a rollout for loops of computer tools: pixels in, screenshots out; plain Python, as `world.py`."""

import json
import os
from base64 import b64encode
from typing import Any
from urllib.request import Request, urlopen

KEYS = {"return": "enter", "page_down": "pagedown", "page_up": "pageup"}


class Device:
    """A screen of `size` pixels, which the agent may be told is another."""

    def __init__(self, told: tuple[int, int] | None = None) -> None:
        about = json.loads(self._ask("").read())
        self.instruction: str = about["instruction"]
        self.is_browser: bool = about["kind"] == "browser"
        self.size: tuple[int, int] = told or (about["width_px"], about["height_px"])

    def screenshot(self) -> str:
        """The screen as base64."""
        return b64encode(self._ask("/screenshot").read()).decode()

    def act(self, action: str, at: Any = None, to: Any = None, **more: object) -> None:
        """An action of `computer_use`, at a point in pixels."""
        arguments = {"action": action, **more}
        arguments |= {} if at is None else {"coordinate": self._relative(at)}
        arguments |= {} if to is None else {"coordinate2": self._relative(to)}
        self._ask("/action", json.dumps(arguments).encode())

    def keys(self, names: list[str]) -> None:
        """Press keys together."""
        self.act("key", keys=[KEYS.get(name.lower(), name.lower()) for name in names])

    def _relative(self, at: Any) -> list[float]:
        return [1000 * at[side] / self.size[side] for side in (0, 1)]

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Authorization": f"Bearer {os.environ['CUA_DEVICE_TOKEN']}", "Content-Type": "application/json"}
        return urlopen(Request(os.environ["CUA_DEVICE_URL"] + path, data=body, headers=headers), timeout=300)


class Computer:
    """The device as the computer of OpenAI's loops."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def screenshot(self) -> str:
        return self._device.screenshot()

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

    def drag(self, path: list[Any]) -> None:
        start, *_, end = [(at["x"], at["y"]) if isinstance(at, dict) else at for at in path]
        self._device.act("swipe", start, end)
