"""What a task does on a leased device: set-up, the instruction for the agent, and validation."""

import time
from dataclasses import replace

from cua_rl.devices.device import Device
from cua_rl.errors import TaskError, boundary
from cua_rl.judgement import Validation
from cua_rl.tasks.task import Task


async def prepare(task: Task, device: Device) -> None:
    """Set the device up for the task, where the task asks for it; raises `TaskError` if that fails."""
    if task.prepare is not None:
        with boundary(TaskError, f"prepare task {task.task_id!r}"):
            await task.prepare(device)


async def instruct(task: Task, device: Device) -> str:
    """What the agent is told about the task on this prepared device; raises `TaskError` if it cannot be read."""
    if task.read_instruction is None:
        return task.instruction
    with boundary(TaskError, f"read the instruction of task {task.task_id!r}"):
        return await task.read_instruction(device)


async def validate(task: Task, device: Device, answer: str | None) -> Validation:
    """Read success from the device's state; raises `TaskError` if there is no validator, or it fails itself."""
    if task.validate is None:
        raise TaskError(f"expected a validator of task {task.task_id!r}, got none: only a judge can decide it")
    clock = time.monotonic()
    with boundary(TaskError, f"validate task {task.task_id!r}"):
        validation = await task.validate(device, answer)
    return replace(validation, duration_s=time.monotonic() - clock)
