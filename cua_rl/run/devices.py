"""The devices of a run: their backend, which its tasks or its settings choose, resolved once and opened."""

import os
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Literal

from cua_rl.agent.element_tools import Grounder
from cua_rl.environments.browser.django_admin.device import AdminPages
from cua_rl.environments.browser.django_admin.expert import AdminExperts
from cua_rl.environments.browser.miniwob.device import MiniWobPages
from cua_rl.environments.browser.miniwob.expert import MiniWobExperts
from cua_rl.environments.browser.miniwob.pages import DEFAULT_SCALE as MINIWOB_SCALE
from cua_rl.environments.browser.page_tasks import UserPages
from cua_rl.environments.gym.client import GymLimits
from cua_rl.environments.gym.device import AttachDevice
from cua_rl.environments.gym.executions import GymExecutions
from cua_rl.environments.gym.server import DEFAULT_BASE_URL, DEFAULT_GYM_ID
from cua_rl.environments.harness.device import HarnessWorlds
from cua_rl.environments.phone.demo.expert import DemoExperts
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.pool import DeviceBackend, DevicePool, PoolLimits, open_pool
from cua_rl.environments.time_limits import TimeLimits
from cua_rl.errors import ConfigError
from cua_rl.run.preflight import Screen, require_adb
from cua_rl.run.rollout_config import DeviceSettings, RolloutConfig, Tasks
from cua_rl.tasks.expert import Experts
from cua_rl.tasks.source_config import Split, TaskBackendName, find_task_backend, parse_sources

BackendName = TaskBackendName | Literal["simulator", "gbox", "adb"]
"""What operates the devices: determined by the tasks, otherwise the configured device."""

_SMALLEST_SCREENS = {
    "simulator": Screen(kind="android", width_px=192, height_px=320),
    "android": Screen(kind="android", width_px=720, height_px=1280),
    "linux": Screen(kind="linux", width_px=1024, height_px=768),
    "page": Screen(kind="browser", width_px=1024, height_px=768),
    "miniwob": Screen(kind="browser", width_px=160, height_px=210),
}
_USUAL_PHONE = Screen(kind="android", width_px=1080, height_px=2400)
_SPARE_S = 300.0  # a box outlives its rollout by this, for what the time limits do not cover


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """The devices of a run, before they are opened."""

    backend_name: BackendName
    backend: DeviceBackend
    """Not yet entered."""
    smallest_screen: Screen | None
    """Lower bound on the size of screenshots; None if an external agent takes its own."""
    usual_screen: Screen | None
    """The expected size, for planning, of a device whose size is known only when it is leased."""


def find_backend_name(tasks: Tasks, device: Literal["simulator", "gbox", "adb"] = "simulator") -> BackendName:
    """The backend of the devices that these tasks run on; raises `ConfigError` for a mixture."""
    return find_task_backend(tasks) or device


def plan_devices(config: RolloutConfig, log_path: Path, environ: Mapping[str, str] = os.environ) -> DevicePlan:
    """Resolve the configured devices; raises `ConfigError` if they cannot work."""
    name = find_backend_name(config.tasks, config.device)
    screen = _smallest_screen(name, config) if config.agent.name == "gbox" else None
    is_phone = screen == _SMALLEST_SCREENS["android"]
    return DevicePlan(
        backend_name=name,
        backend=_make_backend(name, config, log_path, environ),
        smallest_screen=screen,
        usual_screen=_USUAL_PHONE if is_phone else screen,
    )


def _make_backend(
    name: BackendName, config: RolloutConfig, log_path: Path, environ: Mapping[str, str]
) -> DeviceBackend:
    if name == "gym":
        return make_gym_executions(config, environ)
    _check_devices(config, environ)
    match name:
        case "gbox":
            from cua_rl.environments.gbox.boxes import BoxPlan, GboxBoxes, run_key
            from cua_rl.environments.gbox.device import Capture
            from cua_rl.environments.gbox.service import make_gbox

            # in each turn, the device may take its limit, and an answer may take as long (`compare_speed`)
            agent_s = config.devices.task_timeout_s + 2 * config.max_turns * config.devices.turn_timeout_s
            stages = (config.devices.setup_timeout_s, agent_s, config.devices.validate_timeout_s)
            plan = BoxPlan(
                box_type=config.box_type,
                run_name=log_path.name,
                run_key=run_key(log_path),
                expires_s=sum(stages) + _SPARE_S,
                start_timeout_s=min(config.devices.lease_timeout_s, 300.0),  # the API's longest
                capture=Capture(is_stored=config.devices.gbox_screenshots == "stored"),
                recordings=log_path / "recordings" if config.devices.record_devices else None,
            )
            return GboxBoxes(plan, lambda: make_gbox(config.gbox_api_key))
        case "adb":
            require_adb()
            from cua_rl.environments.android.phones import AdbPhones

            return AdbPhones(config.devices.adb_serials)
        case _:
            devices = config.devices
            return make_local_backend(
                config.tasks, screen_scale=devices.screen_scale, browser_scale=devices.browser_scale
            )


def make_local_backend(tasks: Tasks, *, screen_scale: int, browser_scale: float | None) -> DeviceBackend:
    """Simulated phones, or the browser or Linux desktop that tasks bring with them; raises `ConfigError`."""
    match find_backend_name(tasks):
        case "desktop":
            if find_spec("Xlib") is None or find_spec("mss") is None:
                raise ConfigError(
                    "tasks: expected the packages python-xlib and mss for Linux desktops, got none; install them: pip "
                    "install 'cua_rl[desktop]'"
                )
            from cua_rl.environments.desktop.desktops import LinuxDesktops

            return LinuxDesktops()
        case "miniwob":
            return MiniWobPages(scale=browser_scale)
        case "django_admin":
            return AdminPages(scale=browser_scale)
        case "harness":
            return HarnessWorlds()
        case "page":
            return UserPages(parse_sources(tasks), scale=browser_scale)
        case _:
            if browser_scale is not None:
                raise ConfigError(
                    f"browser_scale: expected it only with tasks on web pages, got {browser_scale!r}; leave it out"
                )
            return SimulatedPhones(scale=screen_scale)


def make_experts(tasks: Tasks) -> Experts:
    match find_backend_name(tasks):
        case "miniwob":
            return MiniWobExperts()
        case "django_admin":
            return AdminExperts()
        case _:
            return DemoExperts()


def require_own_model(name: BackendName, model_name: str | None) -> None:
    """Raise `ConfigError` if the included tiny model would run on a device other than the simulated phone."""
    if model_name is None and name != "simulator":
        raise ConfigError(
            f"model_name: expected the name of a model for {name}, got none: the tiny model of this package knows the "
            "simulated phone alone; set it, such as model_name=Qwen/Qwen3-VL-4B-Instruct"
        )


def _smallest_screen(name: BackendName, config: RolloutConfig) -> Screen:
    match name:
        case "miniwob":
            return _SMALLEST_SCREENS["miniwob"].scaled(config.devices.browser_scale or MINIWOB_SCALE)
        case "django_admin" | "page":
            return _SMALLEST_SCREENS["page"].scaled(config.devices.browser_scale or 1.0)
        case "simulator":
            return _SMALLEST_SCREENS["simulator"].scaled(config.devices.screen_scale)
        case "desktop":
            return _SMALLEST_SCREENS["linux"]
        case _:
            return _SMALLEST_SCREENS[config.box_type]


def _check_devices(config: RolloutConfig, environ: Mapping[str, str]) -> None:
    if config.box_type != "android" and config.device != "gbox":
        raise ConfigError(
            f"box_type: expected 'android', the kind of device={config.device}, got {config.box_type!r}; leave it "
            "out, or set device=gbox"
        )
    if "gbox" in (config.device, config.devices.coordinate_mode):
        _require_gbox("device", config, environ)
    for name, value, device in (
        ("adb_serials", list(config.devices.adb_serials), "adb"),
        ("record_devices", config.devices.record_devices, "gbox"),
    ):
        if value and config.device != device:
            raise ConfigError(f"{name}: expected it only with device={device}, got {value!r}; leave it out")


def _require_gbox(setting: str, config: RolloutConfig, environ: Mapping[str, str], *, otherwise: str = "") -> None:
    """Raise `ConfigError` if GBox boxes, which `setting` asks for, cannot be operated."""
    if find_spec("gbox_sdk") is None:
        raise ConfigError(
            f"{setting}: expected the package gbox-sdk to operate boxes, got none; install it: pip install "
            f"'cua_rl[gbox]'{otherwise}"
        )
    if not (config.gbox_api_key or environ.get("GBOX_API_KEY")):
        raise ConfigError(
            "gbox_api_key: expected the key of a GBox account, got none; set GBOX_API_KEY in the "
            f"environment or in .env (a self-hosted server takes any text){otherwise}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDevices:
    """The devices of a run, ready to be leased."""

    pool: DevicePool
    grounder: Grounder | None
    """Finds described elements on screenshots; None if the model outputs coordinates itself."""
    time_limits: TimeLimits


@asynccontextmanager
async def open_devices(config: RolloutConfig, plan: DevicePlan, *, max_devices: int) -> AsyncGenerator[OpenDevices]:
    """Open the backend, which cleans up after a crashed attempt; everything is released on exit."""
    devices = config.devices
    lease_timeout_s = devices.lease_timeout_s
    if plan.backend_name == "gym":  # creations are queued, and each has its own limit
        lease_timeout_s *= GymLimits().max_create_attempts * ceil(max_devices / devices.gym_parallel_creates)
    pool_limits = PoolLimits(lease_timeout_s=lease_timeout_s, makes_per_s=devices.device_creations_per_s)
    async with AsyncExitStack() as stack:
        grounder = None
        if devices.coordinate_mode == "gbox":
            from cua_rl.environments.gbox.coordinate_model import GboxCoordinateModel
            from cua_rl.environments.gbox.service import make_gbox

            grounder = GboxCoordinateModel(make_gbox(config.gbox_api_key).client)
            stack.push_async_callback(grounder.close)
        pool = await stack.enter_async_context(open_pool(plan.backend, max_devices=max_devices, limits=pool_limits))
        yield OpenDevices(pool=pool, grounder=grounder, time_limits=devices)


def make_gym_executions(config: RolloutConfig, environ: Mapping[str, str] = os.environ) -> GymExecutions:
    """Gym executions, operated by gbox-mini-agent or as GBox boxes by the built-in agent; raises `ConfigError`."""
    limits = GymLimits(
        max_parallel_creates=config.devices.gym_parallel_creates,
        create_timeout_s=config.devices.lease_timeout_s,
        evaluate_timeout_s=config.devices.validate_timeout_s,
    )
    if config.agent.name == "mini_agent":
        return GymExecutions(limits=limits)
    _require_gbox("tasks", config, environ, otherwise=", or set agent=mini_agent")

    def open_attach() -> AbstractAsyncContextManager[AttachDevice]:
        from cua_rl.environments.gbox.boxes import open_held_boxes
        from cua_rl.environments.gbox.service import make_gbox

        return open_held_boxes(make_gbox(config.gbox_api_key), config.box_type)

    return GymExecutions(open_attach=open_attach, limits=limits)


def split_gyms(tasks: Tasks, eval_tasks: Tasks | None, devices: DeviceSettings) -> tuple[Tasks, Tasks | None]:
    """Sources of training and evaluation, named as `name_gym` does; a gym that both use is split between them.

    Where a source says itself which side it wants (`split_type`), it stays as it is.
    """
    tasks = name_gym(tasks, devices)
    if eval_tasks is None:
        return tasks, None
    eval_tasks = name_gym(eval_tasks, devices)
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


def name_gym(tasks: Tasks, devices: DeviceSettings) -> Tasks:
    """The sources with the configured server and gym where they name none."""
    if isinstance(tasks, list):
        return [_name_gym(source, devices) for source in tasks]
    return _name_gym(tasks, devices)


def _name_gym(source: dict[str, object], devices: DeviceSettings) -> dict[str, object]:
    if source.get("source_type") != "gym":
        return source
    configured = {"gym_base_url": devices.gym_base_url, "gym_id": devices.gym_id}
    return {name: value for name, value in configured.items() if value is not None} | source
