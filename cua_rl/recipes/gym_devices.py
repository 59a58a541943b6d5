"""From what the user asked for to the executions of a gym server, and to whoever operates their devices."""

import os
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from typing import Literal, Protocol

from cua_rl.devices.gym.client import GymLimits
from cua_rl.devices.gym.device import AttachDevice
from cua_rl.errors import ConfigError
from cua_rl.recipes.rollout_config import Tasks
from cua_rl.tasks.gym_executions import GymExecutions
from cua_rl.tasks.gym_server import DEFAULT_BASE_URL, DEFAULT_GYM_ID
from cua_rl.tasks.source_config import Split


class GymSettings(Protocol):
    """The part of a recipe's configuration that is about gym servers."""

    @property
    def agent(self) -> str: ...
    @property
    def box_type(self) -> Literal["android", "linux"]: ...
    @property
    def gbox_api_key(self) -> str | None: ...
    @property
    def gym_base_url(self) -> str | None: ...
    @property
    def gym_id(self) -> str | None: ...
    @property
    def gym_parallel_creates(self) -> int: ...
    @property
    def lease_timeout_s(self) -> float: ...
    @property
    def validate_timeout_s(self) -> float: ...


def make_gym_executions(settings: GymSettings, environ: Mapping[str, str] = os.environ) -> GymExecutions:
    """Executions whose devices gbox-mini-agent operates, or we do, as GBox boxes; raises `ConfigError`."""
    limits = GymLimits(
        max_parallel_creates=settings.gym_parallel_creates,
        create_timeout_s=settings.lease_timeout_s,
        evaluate_timeout_s=settings.validate_timeout_s,
    )
    if settings.agent == "mini_agent":
        return GymExecutions(limits=limits)
    if find_spec("gbox_sdk") is None:
        raise ConfigError(
            "tasks: expected the package gbox-sdk to operate the boxes of a gym server, got none; install it "
            "(pip install 'cua_rl[gbox]'), or set agent=mini_agent"
        )
    if not (settings.gbox_api_key or environ.get("GBOX_API_KEY")):
        raise ConfigError(
            "gbox_api_key: expected the key of the GBox account whose boxes the gym server uses, got none; set "
            "GBOX_API_KEY in the environment or in .env, or set agent=mini_agent"
        )

    def open_attach() -> AbstractAsyncContextManager[AttachDevice]:
        from cua_rl.devices.gbox.boxes import open_held_boxes
        from cua_rl.devices.gbox.service import make_gbox

        return open_held_boxes(make_gbox(settings.gbox_api_key), settings.box_type)

    return GymExecutions(open_attach=open_attach, limits=limits)


def split_gyms(tasks: Tasks, eval_tasks: Tasks | None, settings: GymSettings) -> tuple[Tasks, Tasks | None]:
    """Sources of training and evaluation, named as `name_gym` does; a gym that both use is split between them.

    Where a source says itself which side it wants (`split_type`), it stays as it is.
    """
    tasks = name_gym(tasks, settings)
    if eval_tasks is None:
        return tasks, None
    eval_tasks = name_gym(eval_tasks, settings)
    shared = {_gym_of(source) for source in _listed(tasks)} & {_gym_of(source) for source in _listed(eval_tasks)}
    return _take_side(tasks, "train", shared), _take_side(eval_tasks, "eval", shared)


def _listed(tasks: Tasks) -> list[dict[str, object]]:
    return tasks if isinstance(tasks, list) else [tasks]


def _gym_of(source: Mapping[str, object]) -> tuple[object, object] | None:
    """Server and name of a source's gym; None for other sources."""
    if source.get("source_type") != "gym":
        return None
    return str(source.get("gym_base_url", DEFAULT_BASE_URL)).rstrip("/"), source.get("gym_id", DEFAULT_GYM_ID)


def _take_side(tasks: Tasks, side: Split, shared: Collection[tuple[object, object] | None]) -> Tasks:
    def sided(source: dict[str, object]) -> dict[str, object]:
        gym = _gym_of(source)
        return {"split_type": side} | source if gym is not None and gym in shared else source

    return [sided(source) for source in tasks] if isinstance(tasks, list) else sided(tasks)


def name_gym(tasks: Tasks, settings: GymSettings) -> Tasks:
    """The sources with the configured server and gym where they name none."""
    if isinstance(tasks, list):
        return [_name_gym(source, settings) for source in tasks]
    return _name_gym(tasks, settings)


def _name_gym(source: dict[str, object], settings: GymSettings) -> dict[str, object]:
    if source.get("source_type") != "gym":
        return source
    configured = {"gym_base_url": settings.gym_base_url, "gym_id": settings.gym_id}
    return {name: value for name, value in configured.items() if value is not None} | source
