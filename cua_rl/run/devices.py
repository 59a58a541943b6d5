"""The devices of a run: its environment, which its tasks or its settings choose, resolved once and opened."""

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.contract import (
    SMALLEST_PHONE,
    USUAL_PHONE,
    DeviceOrder,
    Environment,
    Source,
    Split,
    SplitSource,
)
from cua_rl.environments.device import Grounder, Screen
from cua_rl.environments.pool import DeviceBackend, DevicePool, PoolLimits, open_pool
from cua_rl.environments.table import DEFAULT_DEVICE, ENVIRONMENTS, find_environment, parse_sources
from cua_rl.run.rollout_config import RolloutConfig, Tasks
from cua_rl.tasks.expert import Experts
from cua_rl.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevices:
    """The devices of a run, before they are opened."""

    environment: Environment
    order: DeviceOrder
    backend: DeviceBackend
    """Not yet entered."""
    smallest_screen: Screen | None
    """Lower bound on the size of screenshots; None if an external agent takes its own."""
    usual_screen: Screen | None
    """The expected size, for planning, of a device whose size is known only when it is leased."""


def prepare_devices(config: RolloutConfig, log_path: Path, environ: Mapping[str, str] = os.environ) -> PreparedDevices:
    """Resolve the configured devices; raises `ConfigError` if they cannot work."""
    sources = parse_sources(config.tasks)
    environment = find_environment(sources, config.device)
    if config.device != DEFAULT_DEVICE and not environment.is_configured:
        got = f"{config.device!r}, but tasks of {environment.name} bring their own devices"
        raise ConfigError(f"device: expected none, got {got}; leave device and box_type out")
    order = DeviceOrder(
        sources=sources,
        environments=ENVIRONMENTS,
        settings=config.devices,
        device=config.device,
        box_type=config.box_type,
        gbox_api_key=config.gbox_api_key,
        is_remote=config.agent.name == "mini_agent",
        max_turns=config.max_turns,
        log_path=log_path,
        environ=environ,
    )
    for one in () if environment.is_hosted else ENVIRONMENTS.values():
        if one.check_settings is not None:
            one.check_settings(order)
    screen = environment.smallest_screen(order) if config.agent.name == "gbox" else None
    return PreparedDevices(
        environment=environment,
        order=order,
        backend=environment.make_backend(order),
        smallest_screen=screen,
        usual_screen=USUAL_PHONE if screen == SMALLEST_PHONE else screen,
    )


def make_expert_backend(tasks: Tasks, settings: DeviceConfig) -> DeviceBackend:
    """The devices on which experts show these tasks; without an expert for them, devices that cost nothing."""
    sources = parse_sources(tasks)
    environment = find_environment(sources)
    if environment.experts is None:
        environment = ENVIRONMENTS[DEFAULT_DEVICE]
    order = DeviceOrder(sources=sources, environments=ENVIRONMENTS, settings=settings)
    return environment.make_backend(order)


def find_experts(tasks: Tasks) -> Experts:
    environment = find_environment(tasks)
    if environment.experts is None:
        raise ConfigError(
            f"tasks: expected tasks with scripted experts, got those of {environment.name}, which no "
            "expert can do; choose others"
        )
    return environment.experts


def require_own_model(environment: Environment, model_name: str | None) -> None:
    """Raise `ConfigError` if the included tiny model would run on a device other than the simulated phone."""
    if model_name is None and not environment.has_tiny_model:
        raise ConfigError(
            f"model_name: expected the name of a model for {environment.name}, got none: the tiny model of this "
            "package only knows the simulated phone; set it, such as model_name=Qwen/Qwen3-VL-4B-Instruct"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDevices:
    """The devices of a run, ready to be leased."""

    pool: DevicePool
    grounder: Grounder | None
    """Finds described elements on screenshots; None if the model outputs coordinates itself."""


@asynccontextmanager
async def open_devices(prepared: PreparedDevices, *, max_devices: int) -> AsyncGenerator[OpenDevices]:
    """Open the backend, which cleans up after a crashed attempt; everything is released on exit."""
    settings = prepared.order.settings
    limits = PoolLimits(
        lease_timeout_s=prepared.environment.lease_timeout_s(settings, max_devices),
        makes_per_s=settings.device_creations_per_s,
    )
    async with AsyncExitStack() as stack:
        grounder = None
        finder = ENVIRONMENTS.get(settings.coordinate_mode)
        if finder is not None and finder.open_grounder is not None:
            grounder = await stack.enter_async_context(finder.open_grounder(prepared.order))
        pool = await stack.enter_async_context(open_pool(prepared.backend, max_devices=max_devices, limits=limits))
        yield OpenDevices(pool=pool, grounder=grounder)


def complete_sources(tasks: Tasks, settings: DeviceConfig) -> list[Source]:
    """The sources with the run's settings where they leave them open; raises `ConfigError`."""
    return [source.completed(settings) for source in parse_sources(tasks)]


def split_sources(train: Sequence[Source], held_out: Sequence[Source]) -> tuple[list[Source], list[Source]]:
    """Sources of training and evaluation, each with its side of the tasks that both name.

    Where a source says itself which side it wants (`split_type`), it stays as it is.
    """
    shared = _shared(train) & _shared(held_out)

    def take(source: Source, side: Split) -> Source:
        if isinstance(source, SplitSource) and source.split_type is None and source.shared_as in shared:
            return replace(source, split_type=side)
        return source

    return [take(source, "train") for source in train], [take(source, "eval") for source in held_out]


def _shared(sources: Sequence[Source]) -> set[object]:
    return {source.shared_as for source in sources if isinstance(source, SplitSource)} - {None}
