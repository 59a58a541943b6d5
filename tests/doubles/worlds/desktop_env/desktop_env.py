"""Stands for the module desktop_env.desktop_env of OSWorld on a scripted machine: the task is to type a word."""

import io
import os
import sys
import time
from typing import Any

from PIL import Image


class DesktopEnv:
    """Takes what the real one takes, as far as it is used; `provider_name` says what happens to the machine."""

    def __init__(
        self,
        provider_name: str = "vmware",
        path_to_vm: str | None = None,
        action_space: str = "pyautogui",
        cache_dir: str = "cache",
        screen_size: tuple[int, int] = (1920, 1080),
        headless: bool = False,
        require_a11y_tree: bool = True,
    ) -> None:
        assert (action_space, require_a11y_tree) == ("pyautogui", False)
        self.script, self.size = provider_name, screen_size
        self.is_environment_used = False
        self.actions: list[str] = []
        self.config: dict[str, Any] = {}

    def reset(self, task_config: dict[str, Any]) -> dict[str, Any]:
        self.config, self.is_environment_used = task_config, self.script != "not set up"
        return self.observe()

    def observe(self) -> dict[str, Any]:
        if self.script == "lost" and self.actions:
            return {"screenshot": None}
        file = io.BytesIO()
        Image.new("RGB", self.size, "white").save(file, "PNG")
        return {"screenshot": file.getvalue(), "accessibility_tree": None, "instruction": self.config["instruction"]}

    def step(self, action: str, pause: float = 2) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        self.actions.append(action)
        if self.script == "hangs":
            os.write(1, b"hangs\n")
            time.sleep(600)
        return self.observe(), 0, action in ("DONE", "FAIL"), {}

    def evaluate(self) -> float:
        if self.actions[-1:] == ["FAIL"]:
            return float(self.config["evaluator"]["func"] == "infeasible")
        return float(f"pyautogui.typewrite({self.config['evaluator']['expected']!r}, interval=0.02)" in self.actions)

    def render(self) -> bytes | None:
        return None if self.script == "lost at the end" else self.observe()["screenshot"]

    def close(self) -> None:
        sys.stdout.write(f"closed {self.actions}\n")
