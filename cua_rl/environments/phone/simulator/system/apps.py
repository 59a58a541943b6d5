"""The pages of Settings about apps: the list, an app's page, what it stores, and the storage of all."""

from cua_rl.environments.phone.simulator.catalog import STORE_APPS, WIDTH
from cua_rl.environments.phone.simulator.controls import Column, app_row, pill, place, row
from cua_rl.environments.phone.simulator.elements import Launch, Operate, Push
from cua_rl.environments.phone.simulator.state import InstalledApp, PhoneState

_CAPACITY_GB = 16
_SYSTEM_MB = 4_200


def app_list(state: PhoneState, column: Column) -> None:
    """All installed apps by name; a tap opens the app's page."""
    for entry in state.system.apps:
        column.stack(app_row(entry.app, "app", effect=Push(subscreen=f"app:{entry.app}")))


def storage(state: PhoneState, column: Column) -> None:
    """How full the phone is, and the apps by size, largest first."""
    used_gb = (_SYSTEM_MB + sum(_total_mb(entry) for entry in state.system.apps)) / 1000
    text = f"{used_gb:.1f} GB of {_CAPACITY_GB} GB used"
    box = (12, column.y + 4, WIDTH - 24, 34)
    column.add(place("meter", "Used", "meter", box, text=text, level=used_gb / _CAPACITY_GB))
    for entry in sorted(state.system.apps, key=_total_mb, reverse=True):
        effect = Push(subscreen=f"app_storage:{entry.app}")
        column.stack(app_row(entry.app, "app", detail=f"{_total_mb(entry)} MB", effect=effect))


def app_info(state: PhoneState, column: Column, app: str) -> str:
    """One app: open, uninstall, stop, notifications, storage. Returns the page's title."""
    entry = state.system.find_app(app)
    if entry is None:
        column.add_text("This app is not installed.")
        return "App info"
    column.stack(app_row(entry.app, "app", detail="Running" if entry.is_running else "Stopped"))
    y = column.y + 6
    uninstall = Push(subscreen=f"ask:uninstall:{app}") if app in STORE_APPS else None
    stop = Push(subscreen=f"ask:force_stop:{app}") if entry.is_running else None
    column.add(
        pill("Open", (8, y, 56, 24), Launch(app=app)),
        pill("Uninstall", (68, y, 56, 24), uninstall),
        pill("Force stop", (128, y, 56, 24), stop),
    )
    column.y += 6
    column.stack(
        row(
            "notifications",
            text="Notifications",
            effect=Operate(command="switch_notifications", target=app),
            kind="switch_row",
            is_on=entry.may_notify,
        )
    )
    column.stack(
        row(
            "page:app_storage",
            label="Storage",
            text="Storage and cache",
            detail=f"{_total_mb(entry)} MB",
            effect=Push(subscreen=f"app_storage:{app}"),
        )
    )
    return "App info"


def app_storage(state: PhoneState, column: Column, app: str) -> str:
    """What one app takes up. Returns the page's title."""
    entry = state.system.find_app(app)
    if entry is None:
        column.add_text("This app is not installed.")
        return "Storage"
    column.stack(app_row(entry.app, "app", detail=f"{_total_mb(entry)} MB in all"))
    for name, size_mb in (("App", entry.size_mb), ("Cache", entry.cache_mb)):
        column.stack(row(f"size:{name}", text=name, detail=f"{size_mb} MB"))
    clear = Operate(command="clear_cache", target=app) if entry.cache_mb else None
    column.add(pill("Clear cache", (12, column.y + 8, 84, 24), clear))
    return "Storage"


def _total_mb(entry: InstalledApp) -> int:
    return entry.size_mb + entry.cache_mb
