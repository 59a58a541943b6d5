"""The screen timeout, with functions that are `async` and talk to the device itself."""

from dataclasses import dataclass

from cua_rl.environments.device import ShellDevice

from .validator import TimeoutValidator


@dataclass
class Task:
    name: str = "Screen timeout of 5 minutes"
    description: str = "Set the screen timeout to 5 minutes."
    category: str = "settings"
    max_turns: int = 12

    def get_validator(self) -> TimeoutValidator:
        return TimeoutValidator(300_000)

    def get_pre_hook(self):
        return shorten


async def shorten(device: ShellDevice) -> None:
    await device.shell("settings put system screen_off_timeout 30000")


def create_task() -> Task:
    return Task()
