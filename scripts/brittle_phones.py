"""Simulated phones that can be broken on one machine: the devices of `scripts.chaos_ray fault=devices`.

An environment of another package, of which `install` writes what pip would leave. Where BRITTLE_PHONES names a file,
every operation of every phone fails while there is such a file.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cua_rl.environments.contract import Environment, Loading, Source
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.phone.demo.phone import SIMULATOR as SIMULATED
from cua_rl.environments.phone.demo.phone import SimulatedPhones, make_simulated_phone
from cua_rl.environments.phone.demo.templates import DEMO_TRAINING
from cua_rl.environments.phone.environment import SIMULATOR
from cua_rl.environments.phone.simulator.device import Operation, SimulatedPhone
from cua_rl.environments.pool import DeviceRequest
from cua_rl.environments.table import ENTRY_POINTS
from cua_rl.tasks.task import Template
from cua_rl.types.errors import DeviceError

VARIABLE = "BRITTLE_PHONES"
ABILITIES = replace(SIMULATED, environment="brittle")
OPTIONS = ('tasks={"source_type": "brittle", "tags": ["demo"]}', "eval_tasks=none")
"""Of the training recipe."""


def install(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of processes that find this environment."""
    info = folder / "brittle_phones-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle-phones\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nbrittle = {__name__}:BRITTLE\n")
    path = [str(folder), str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _fail_if_broken(operation: Operation) -> None:
    file = os.environ.get(VARIABLE)
    if file and Path(file).exists():
        raise DeviceError(f"expected a phone to {operation}, got a broken one: there is {file}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrittlePhones(SimulatedPhones):
    """The backend."""

    abilities: DeviceAbilities = ABILITIES

    async def make(self, request: DeviceRequest) -> SimulatedPhone:
        """A phone that is whole, so far."""
        phone = make_simulated_phone(request)
        return SimulatedPhone(phone.state, device_id=phone.device_id, on_operation=_fail_if_broken)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrittleSource(Source):
    """The demo tasks."""

    source_types = ("brittle",)

    def load(self, loading: Loading) -> Sequence[Template]:
        return DEMO_TRAINING


BRITTLE = Environment(
    name="brittle",
    sources=(BrittleSource,),
    has_tiny_model=True,
    make_backend=lambda order: BrittlePhones(),
    smallest_screen=SIMULATOR.smallest_screen,
)
