"""Brightness on a real phone: a validator that reads it, a pre-hook that lowers it first."""

from dataclasses import dataclass

from .pre_hook import dim
from .validator import BrightnessValidator


@dataclass
class Task:
    name: str = "Maximum brightness"
    description: str = "Set the screen brightness to maximum."
    category: str = "settings"
    max_turns: int = 10

    def get_validator(self) -> BrightnessValidator:
        return BrightnessValidator(255)

    def get_pre_hook(self):
        return dim


def create_task() -> Task:
    return Task()
