"""From a leased device to one on which an agent can begin: set-up, and what the agent is told."""

from cua_rl.devices.device import Device
from cua_rl.errors import TaskError, boundary
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
