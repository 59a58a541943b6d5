"""The phone on which a demo task begins."""

from dataclasses import dataclass
from itertools import count
from typing import Self

from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.query_values import SIMULATOR_QUERIES
from cua_rl.environments.phone.simulator.start import Start, make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.environments.pool import DeviceRequest
from cua_rl.tasks.task import Task
from cua_rl.types.errors import TaskError

SIMULATOR = DeviceAbilities(name="the embedded simulator", has_shell=False, is_seeded=True, queries=SIMULATOR_QUERIES)

_serial_numbers = count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPhones:
    """The `DeviceBackend` of simulated phones: nothing to start, nothing to clean up."""

    scale: int = 1
    latency_s: float = 0.0
    abilities: DeviceAbilities = SIMULATOR

    async def make(self, request: DeviceRequest) -> Device:
        """A fresh phone of the task's seed, or the copy of one."""
        phone = make_simulated_phone(request, scale=self.scale, latency_s=self.latency_s)
        if request.snapshot is not None:
            assert isinstance(request.snapshot.state, PhoneState), "snapshots of a run are of its own devices"
            phone.state = request.snapshot.state
        return phone

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None: ...


def make_simulated_phone(task: Task | DeviceRequest, *, scale: int = 1, latency_s: float = 0.0) -> SimulatedPhone:
    """A fresh phone of the task's seed, in a state in which the task is not done yet."""
    start = task.world if isinstance(task.world, Start) else find_template(task.task_id).instance(task.seed).start
    state = make_phone_state(task.seed, start)
    device_id = f"simulator-{next(_serial_numbers)}"
    return SimulatedPhone(state, scale=scale, device_id=device_id, latency_s=latency_s)


def find_template(task_id: str) -> TaskTemplate:
    """The demo template of a task; raises `TaskError` for a task of another kind."""
    template = TEMPLATES.get(task_id)
    if template is None:
        raise TaskError(f"expected a task that runs on the embedded phone, got {task_id!r}; run it on another device")
    return template
