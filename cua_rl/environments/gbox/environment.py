"""GBox boxes as an environment; `gbox_sdk` is imported only where they are used."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec

from cua_rl.environments.contract import PAID_DEVICES, DeviceOrder, Environment
from cua_rl.environments.device import AttachDevice, Grounder
from cua_rl.environments.pool import DeviceBackend
from cua_rl.types.errors import ConfigError

_SPARE_S = 300.0  # a box outlives its rollout by this, for what the time limits do not cover


def _check_settings(order: DeviceOrder) -> None:
    is_chosen = order.device == "gbox"
    if order.box_type != "android" and not is_chosen:
        raise ConfigError(
            f"box_type: expected 'android', the kind of device={order.device}, got {order.box_type!r}; leave it "
            "out, or set device=gbox"
        )
    if is_chosen or order.settings.coordinate_mode == "gbox":
        _require_account(order, "device")
    if order.settings.record_devices and not is_chosen:
        raise ConfigError("record_devices: expected it only with device=gbox, got True; leave it out")


def _make_backend(order: DeviceOrder) -> DeviceBackend:
    from cua_rl.environments.gbox.boxes import GboxBoxes, run_key
    from cua_rl.environments.gbox.device import Capture
    from cua_rl.environments.gbox.service import make_gbox

    settings = order.settings
    # in each turn, the device may take its limit, and an answer may take as long (`compare_speed`)
    agent_s = settings.task_timeout_s + 2 * order.max_turns * settings.turn_timeout_s
    return GboxBoxes(
        connect=lambda: make_gbox(order.gbox_api_key),
        box_type=order.box_type,
        run_name=order.log_path.name,
        run_key=run_key(order.log_path),
        expires_s=settings.setup_timeout_s + agent_s + settings.validate_timeout_s + _SPARE_S,
        start_timeout_s=min(settings.lease_timeout_s, 300.0),  # the API's longest
        capture=Capture(is_stored=settings.gbox_screenshots == "stored"),
        recordings=order.log_path / "recordings" if settings.record_devices else None,
    )


def _open_attach(order: DeviceOrder) -> AbstractAsyncContextManager[AttachDevice]:
    """Boxes that a gym server holds."""
    _require_account(order, "tasks", ", or set agent=mini_agent")
    return _open_held(order)


@asynccontextmanager
async def _open_grounder(order: DeviceOrder) -> AsyncGenerator[Grounder]:
    from cua_rl.environments.gbox.coordinate_model import GboxCoordinateModel
    from cua_rl.environments.gbox.service import make_gbox

    model = GboxCoordinateModel(make_gbox(order.gbox_api_key).client)
    try:
        yield model
    finally:
        await model.close()


@asynccontextmanager
async def _open_held(order: DeviceOrder) -> AsyncGenerator[AttachDevice]:
    from cua_rl.environments.gbox.boxes import open_held_boxes
    from cua_rl.environments.gbox.service import make_gbox

    async with open_held_boxes(make_gbox(order.gbox_api_key), order.box_type) as attach:
        yield attach


def _require_account(order: DeviceOrder, setting: str, otherwise: str = "") -> None:
    """Raise `ConfigError` if GBox boxes, which `setting` asks for, cannot be operated."""
    if find_spec("gbox_sdk") is None:
        raise ConfigError(
            f"{setting}: expected the package gbox-sdk to operate boxes, got none; install it: pip install "
            f"'cua_rl[gbox]'{otherwise}"
        )
    if not (order.gbox_api_key or order.environ.get("GBOX_API_KEY")):
        raise ConfigError(
            "gbox_api_key: expected the key of a GBox account, got none; set GBOX_API_KEY in the "
            f"environment or in .env (a self-hosted server takes any text){otherwise}"
        )


GBOX = Environment(
    name="gbox",
    is_configured=True,
    presets=PAID_DEVICES,
    charges="GBox charges for its boxes",
    make_backend=_make_backend,
    check_settings=_check_settings,
    open_attach=_open_attach,
    open_grounder=_open_grounder,
)
