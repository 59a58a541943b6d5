"""What runs and evaluations ask of devices: which backend, how patient, and who finds elements on screenshots."""

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Literal, Protocol

from cua_rl.agent.element_tools import Grounder
from cua_rl.devices.gym.client import GymLimits
from cua_rl.devices.pool import DeviceBackend, DevicePool, PoolLimits, open_pool
from cua_rl.errors import ConfigError
from cua_rl.rollout.run import TimeLimits
from cua_rl.run.device_backends import DeviceSettings, make_backend
from cua_rl.run.gyms import make_gym_executions
from cua_rl.run.preflight import Screen, require_adb
from cua_rl.tasks.miniwob.pages import DEFAULT_SCALE as MINIWOB_SCALE
from cua_rl.tasks.source_config import find_site

_SMALLEST_SCREENS = {
    "simulator": Screen(kind="android", width_px=192, height_px=320),
    "android": Screen(kind="android", width_px=720, height_px=1280),
    "linux": Screen(kind="linux", width_px=1024, height_px=768),
    "page": Screen(kind="browser", width_px=1024, height_px=768),
    "miniwob": Screen(kind="browser", width_px=160, height_px=210),
}
_SPARE_S = 300.0  # a box outlives its rollout by this, for what the time limits do not cover


class RunDeviceSettings(DeviceSettings, Protocol):
    """The part of a run's configuration that is about devices."""

    @property
    def box_type(self) -> Literal["android", "linux"]: ...
    @property
    def agent(self) -> str: ...
    @property
    def gym_base_url(self) -> str | None: ...
    @property
    def gym_id(self) -> str | None: ...
    @property
    def gym_parallel_creates(self) -> int: ...
    @property
    def coordinate_mode(self) -> Literal["direct", "gbox"]: ...
    @property
    def gbox_api_key(self) -> str | None: ...
    @property
    def gbox_screenshots(self) -> Literal["inline", "stored"]: ...
    @property
    def record_devices(self) -> bool: ...
    @property
    def adb_serials(self) -> Sequence[str]: ...
    @property
    def device_creations_per_s(self) -> float | None: ...
    @property
    def lease_timeout_s(self) -> float: ...
    @property
    def setup_timeout_s(self) -> float: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def turn_timeout_s(self) -> float: ...
    @property
    def task_timeout_s(self) -> float: ...
    @property
    def validate_timeout_s(self) -> float: ...


def make_run_backend(
    settings: RunDeviceSettings, log_path: Path, environ: Mapping[str, str] = os.environ
) -> DeviceBackend:
    """The configured backend, not yet entered; raises `ConfigError` for what can never work."""
    if find_site(settings.tasks) == "gym":
        return make_gym_executions(settings, environ)
    _check(settings, environ)
    match settings.device:
        case "gbox":
            return _make_boxes(settings, log_path)
        case "adb":
            require_adb()
            from cua_rl.devices.android.phones import AdbPhones

            return AdbPhones(settings.adb_serials)
        case _:
            return make_backend(settings)


def require_own_model(settings: DeviceSettings, model_name: str | None) -> None:
    """Raise `ConfigError` if the tiny model of this package would meet another device than its own."""
    place = find_site(settings.tasks) or settings.device
    if model_name is None and place != "simulator":
        raise ConfigError(
            f"model_name: expected the name of a model for {place}, got none: the tiny model of this package knows the "
            "simulated phone alone; set it, such as model_name=Qwen/Qwen3-VL-4B-Instruct"
        )


def smallest_screen(settings: RunDeviceSettings) -> Screen | None:
    """The least that a screenshot of the configured devices has; None where another agent takes its own."""
    if settings.agent != "gbox":
        return None
    match find_site(settings.tasks):
        case "miniwob":
            return _SMALLEST_SCREENS["miniwob"].scaled(settings.browser_scale or MINIWOB_SCALE)
        case "django_admin" | "page":
            return _SMALLEST_SCREENS["page"].scaled(settings.browser_scale or 1.0)
        case None if settings.device == "simulator":
            return _SMALLEST_SCREENS["simulator"].scaled(settings.screen_scale)
        case "desktop":
            return _SMALLEST_SCREENS["linux"]
        case _:
            return _SMALLEST_SCREENS[settings.box_type]


def _pool_limits(settings: RunDeviceSettings, max_devices: int) -> PoolLimits:
    """How patient the pool is: executions of a gym queue up for their turn, and are limited one by one."""
    lease_timeout_s = settings.lease_timeout_s
    if find_site(settings.tasks) == "gym":
        lease_timeout_s *= GymLimits().max_create_attempts * ceil(max_devices / settings.gym_parallel_creates)
    return PoolLimits(lease_timeout_s=lease_timeout_s, makes_per_s=settings.device_creations_per_s)


def _time_limits(settings: RunDeviceSettings) -> TimeLimits:
    """How long the stages of a rollout may take."""
    return TimeLimits(
        prepare_s=settings.setup_timeout_s,
        turn_s=settings.turn_timeout_s,
        agent_s=settings.task_timeout_s,
        validate_s=settings.validate_timeout_s,
    )


async def _open_grounder(stack: AsyncExitStack, settings: RunDeviceSettings) -> Grounder | None:
    """Who finds described elements; None where the model gives coordinates itself."""
    if settings.coordinate_mode == "direct":
        return None
    from cua_rl.devices.gbox.coordinate_model import GboxCoordinateModel
    from cua_rl.devices.gbox.service import make_gbox

    model = GboxCoordinateModel(make_gbox(settings.gbox_api_key).client)
    stack.push_async_callback(model.close)
    return model


def _check(settings: RunDeviceSettings, environ: Mapping[str, str]) -> None:
    if settings.box_type != "android" and settings.device != "gbox":
        raise ConfigError(
            f"box_type: expected 'android', the kind of device={settings.device}, got {settings.box_type!r}; leave it "
            "out, or set device=gbox"
        )
    if "gbox" in (settings.device, settings.coordinate_mode):
        _check_gbox(settings, environ)
    for name, value, device in (
        ("adb_serials", list(settings.adb_serials), "adb"),
        ("record_devices", settings.record_devices, "gbox"),
    ):
        if value and settings.device != device:
            raise ConfigError(f"{name}: expected it only with device={device}, got {value!r}; leave it out")


def _check_gbox(settings: RunDeviceSettings, environ: Mapping[str, str]) -> None:
    if find_spec("gbox_sdk") is None:
        raise ConfigError(
            "device: expected the package gbox-sdk for GBox, got none; install it: pip install 'cua_rl[gbox]'"
        )
    if not (settings.gbox_api_key or environ.get("GBOX_API_KEY")):
        raise ConfigError(
            "gbox_api_key: expected the key of a GBox account, got none; set GBOX_API_KEY in the environment or in "
            ".env (a self-hosted server takes any text)"
        )


def _make_boxes(settings: RunDeviceSettings, log_path: Path) -> DeviceBackend:
    from cua_rl.devices.gbox.boxes import BoxPlan, GboxBoxes, run_key
    from cua_rl.devices.gbox.device import Capture
    from cua_rl.devices.gbox.service import make_gbox

    agent_s = settings.task_timeout_s + settings.max_turns * settings.turn_timeout_s
    stages = (settings.setup_timeout_s, agent_s, settings.validate_timeout_s)
    plan = BoxPlan(
        box_type=settings.box_type,
        run_name=log_path.name,
        run_key=run_key(log_path),
        expires_s=sum(stages) + _SPARE_S,
        start_timeout_s=min(settings.lease_timeout_s, 300.0),  # the API's longest
        capture=Capture(is_stored=settings.gbox_screenshots == "stored"),
        recordings=log_path / "recordings" if settings.record_devices else None,
    )
    return GboxBoxes(plan, lambda: make_gbox(settings.gbox_api_key))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDevices:
    """The devices of a run, ready to be leased."""

    pool: DevicePool
    grounder: Grounder | None
    time_limits: TimeLimits


@asynccontextmanager
async def open_devices(
    settings: RunDeviceSettings, backend: DeviceBackend, *, max_devices: int
) -> AsyncGenerator[OpenDevices]:
    """Enter the backend, which removes what a crashed attempt left; at the end nothing of it is left."""
    async with AsyncExitStack() as stack:
        grounder = await _open_grounder(stack, settings)
        pool = await stack.enter_async_context(
            open_pool(backend, max_devices=max_devices, limits=_pool_limits(settings, max_devices))
        )
        yield OpenDevices(pool=pool, grounder=grounder, time_limits=_time_limits(settings))
