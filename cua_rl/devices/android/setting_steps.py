"""Undoing goals about settings: switches, numbers, permissions of apps."""

from shlex import quote

from cua_rl.devices.android.package_queries import NOTIFY_PERMISSION, full_permission, read_permissions
from cua_rl.devices.android.queries import MEDIA_VOLUME
from cua_rl.devices.android.readings import parse_volume
from cua_rl.devices.android.wish import Step, Wish
from cua_rl.errors import TaskError

_SIMULATED_VOLUMES = (0, 15)
_DARKEST = {"0", "1"}
_OWN_BRIGHTNESS = "settings put system screen_brightness_mode 0"
"""Or the phone's own idea of the right brightness moves it back."""


def switch(command: str, on: str, off: str) -> Step:
    """`command` with ON in place of the braces turns the switch on."""

    async def run(wish: Wish) -> str:
        return await wish.shell.run(command.format(on if wish.opposite == "true" else off))

    return run


def switch_setting(namespace: str, key: str) -> Step:
    """Put 1 or 0 into a setting."""
    return switch(f"settings put {namespace} {key} {{}}", "1", "0")


async def switch_ring_vibration(wish: Wish) -> str:
    """Set what Android has for it: the intensity since 13, the older switch beside it."""
    value = "1" if wish.opposite == "true" else "0"
    keys = ("ring_vibration_intensity", "vibrate_when_ringing")
    puts = "; ".join(f"settings put system {key} {value}" for key in keys)
    return await wish.shell.run(f"settings put system vibrate_on 1; {puts}")


async def move_screen_timeout(wish: Wish) -> str:
    """One minute, or two if one is wanted: every phone offers both."""
    timeout_ms = 60_000 if wish.expected != "60000" else 120_000
    return await wish.shell.run(f"settings put system screen_off_timeout {timeout_ms}")


async def move_brightness(wish: Wish) -> str:
    """The middle, or a quarter if the middle is wanted."""
    return await _set_brightness(wish, 128 if wish.expected != "128" else 64)


async def move_brightness_away(wish: Wish) -> str:
    """The other half."""
    return await _set_brightness(wish, 230 if int(wish.argument) < 50 else 25)


async def _set_brightness(wish: Wish, level: int) -> str:
    return await wish.shell.run(f"{_OWN_BRIGHTNESS}; settings put system screen_brightness {level}")


async def require_reachable_brightness(wish: Wish) -> str:
    """The darkest level differs between phones."""
    if wish.expected in _DARKEST:
        raise TaskError(
            f"expected a brightness that every phone has, got {wish.expected!r}: the darkest is 1 on one phone and 10 "
            "on another; ask for brightness_is_about:0"
        )
    return ""


async def move_volume(wish: Wish) -> str:
    """The middle, or one more if the middle is wanted."""
    _, minimum, maximum = parse_volume(await wish.shell.run(MEDIA_VOLUME))
    middle = (minimum + maximum) // 2
    return await _set_volume(wish, middle if str(middle) != wish.expected else middle + 1)


async def move_volume_away(wish: Wish) -> str:
    """The other end."""
    _, minimum, maximum = parse_volume(await wish.shell.run(MEDIA_VOLUME))
    return await _set_volume(wish, maximum if int(wish.argument) < 50 else minimum)


async def _set_volume(wish: Wish, level: int) -> str:
    return await wish.shell.run(f"cmd media_session volume --stream 3 --set {level}")


async def require_simulated_volumes(wish: Wish) -> str:
    """A volume in steps means the same only on a phone with as many steps as the simulated one."""
    _, *limits = parse_volume(await wish.shell.run(MEDIA_VOLUME))
    if tuple(limits) != _SIMULATED_VOLUMES and wish.expected not in ("", str(limits[0])):
        raise TaskError(
            f"expected a phone whose media volume goes from 0 to 15 for {wish.query!r} {wish.expected!r}, got one from "
            f"{limits[0]} to {limits[1]}; ask for media_volume_is_about:PERCENT"
        )
    return ""


async def move_time_zone(wish: Wish) -> str:
    """London, or Tokyo if London is wanted."""
    zone = "Europe/London" if wish.expected != "London" else "Asia/Tokyo"
    return await wish.shell.run(f"settings put global auto_time_zone 0; cmd alarm set-timezone {zone}")


async def require_adb(wish: Wish) -> str:
    """Settings switches adb off together with the developer options."""
    if wish.query == "usb_debugging" or wish.opposite == "true":
        raise TaskError(
            f"expected a goal that leaves adb alone, got {wish.query!r} {wish.expected!r}: without USB debugging the "
            "phone can be neither prepared nor checked; run this task on the simulated phone"
        )
    return ""


async def require_permission(wish: Wish) -> str:
    """The app must be there and ask for the permission."""
    package, permission = _permission(wish)
    granted = await read_permissions(wish.shell, package)
    if granted is None:
        raise TaskError(f"expected {package!r} to be installed for {wish.query!r}; install it: adb install FILE")
    if permission not in granted:
        raise TaskError(f"expected {package!r} to ask for the permission {permission!r}, it does not: {wish.query!r}")
    return ""


async def switch_permission(wish: Wish) -> str:
    """Grant or revoke."""
    package, permission = _permission(wish)
    verb = "grant" if wish.opposite == "true" else "revoke"
    return await wish.shell.run(f"pm {verb} --user 0 {quote(package)} {quote(permission)}")


def _permission(wish: Wish) -> tuple[str, str]:
    package, _, permission = wish.argument.partition("/")
    return package, full_permission(permission) if permission else NOTIFY_PERMISSION
