"""A task: what the agent is told, how the device is prepared, and how success is read from its state."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from cua_rl.devices.device import Device
from cua_rl.devices.gym.fields import GymTaskRef
from cua_rl.devices.simulator.start import Start
from cua_rl.types import Validation

Category = Literal["system", "navigation", "settings", "app", "input"]
Difficulty = Literal["easy", "medium", "hard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task instance: all members of a group run it from the same `seed`, which fixes layout, names and states.

    `validate` reads the device's state, never the agent's claim; `answer` is the agent's final message, for tasks that
    ask a question. Without it, a judge decides from screenshots.
    """

    task_id: str
    """The template, such as "train_01_open_settings"; instances of one template differ in `seed`."""
    seed: int
    instruction: str
    category: Category
    difficulty: Difficulty
    max_turns: int
    validate: Callable[[Device, str | None], Awaitable[Validation]] | None
    tags: tuple[str, ...] = ()
    prepare: Callable[[Device], Awaitable[None]] | None = None
    """Runs on the leased device before the agent sees it."""
    read_instruction: Callable[[Device], Awaitable[str]] | None = None
    """Reads off the prepared device what the agent is told, where nothing else knows; None tells `instruction`."""
    start: Start | None = None
    """How the simulated phone begins; None leaves it to the task's template."""
    gym: GymTaskRef | None = None
    """Where a gym server has it."""
