"""Runs the parts of a task on a leased device: set-up, the instruction for the agent, and validation."""

import time
from dataclasses import replace

from cua_rl.environments.device import Device
from cua_rl.tasks.task import Task
from cua_rl.types.errors import AbsentError, CheckError, TaskError, UnusableError, boundary
from cua_rl.types.judgement import Validation


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
    """Read success from the device's state; what is absent, or no longer usable, is not done.

    Raises `CheckError` if the validator itself fails, `DeviceError` if the device fails, `TaskError` if there is no
    validator.
    """
    if task.validate is None:
        raise TaskError(f"expected a validator of task {task.task_id!r}, got none: only a judge can decide it")
    clock = time.monotonic()
    try:
        with boundary(CheckError, f"validate task {task.task_id!r}"):
            validation = await task.validate(device, answer)
    except (AbsentError, UnusableError) as error:
        validation = not_done(str(error))
    except CheckError:
        raise
    except TaskError as error:
        raise CheckError(str(error)) from error
    return replace(validation, duration_s=time.monotonic() - clock)


def not_done(reason: str) -> Validation:
    """The validation of a task whose check finds nothing to read."""
    return Validation(query="check", expected="something to read", actual=reason, success=False)
