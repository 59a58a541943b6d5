"""Undoing goals on a real phone: settings, apps, files, contacts, calls, alarms, pictures, notifications, networks.

Only what the goal names is deleted: a file, an empty folder, a contact with this name and number, a number in the list
of calls.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from json import JSONDecodeError, loads
from posixpath import dirname
from shlex import quote
from typing import Literal, cast

from cua_rl.environments.android import queries
from cua_rl.environments.android.outputs import parse_alarm_times, parse_rows, parse_volume
from cua_rl.environments.android.shell import AndroidShell
from cua_rl.types.errors import TaskError

_SIMULATED_VOLUMES = (0, 15)
_DARKEST = {"0", "1"}
_OWN_BRIGHTNESS = "settings put system screen_brightness_mode 0"
"""Turns off adaptive brightness, which would revert the change."""
_RAW_CONTACTS = "content://com.android.contacts/raw_contacts"
_CONTACT_DATA = "content://com.android.contacts/data"
_NOTIFY = "cmd notification post -t Reminder cua_rl_$(date +%s%N) 'Water the plants'"
_EXAMPLE_NUMBER = "555 0142"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A goal that must not hold when the task begins; `argument` is the part of the query after the colon.

    For a question ("told") the answer must not be `expected` yet; "" accepts any answer.
    """

    shell: AndroidShell
    query: str
    argument: str
    expected: str
    how: str

    async def holds(self) -> bool:
        """Whether the goal is met; raises `TaskError` for an unknown kind of goal."""
        actual = await queries.read_android_query(self.shell, self.query)
        match self.how:
            case "equals" | "told":
                return actual == self.expected
            case "includes":
                wanted, items = self._item(self.expected), self._item(actual)
                if not isinstance(items, list):
                    raise TaskError(
                        f"expected {self.query!r} to be a list to look for {self.expected!r} in, got {actual!r}"
                    )
                return wanted in cast("list[object]", items)
            case _:
                raise TaskError(f"expected how to be 'equals', 'includes' or 'told', got {self.how!r}")

    async def is_undone(self) -> bool:
        """Whether the goal is not met."""
        return not await self.holds()

    def _item(self, text: str) -> object:
        try:
            return loads(text)
        except JSONDecodeError as error:
            raise TaskError(f"expected JSON to look for in {self.query!r}, got {text!r}") from error

    @property
    def opposite(self) -> str:
        """The other value of a switch; raises `TaskError` unless `expected` is "true" or "false"."""
        if self.expected not in ("true", "false"):
            raise TaskError(f"expected {self.query!r} to be wanted as 'true' or 'false', got {self.expected!r}")
        return "false" if self.expected == "true" else "true"


Step = Callable[[Wish], Awaitable[str]]
"""Changes the phone and returns the command's output, for error messages."""


async def nothing(wish: Wish) -> str:
    """Leave the phone alone."""
    return ""


def refuse(advice: str) -> Step:
    """Raise `TaskError`: the goal holds and must be undone by hand."""

    async def raise_error(wish: Wish) -> str:
        raise TaskError(
            f"expected a phone on which {wish.query!r} is anything but {wish.expected!r}, got one where it is; {advice}"
        )

    return raise_error


_LEAVE_IT = refuse("change it by hand, there is no way to do it over adb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """`require` runs first and raises `TaskError` if the goal cannot be reached on this phone; `undo` runs if it holds.

    `is_place`: the goal is about what is in front, which may be the home screen itself. `battery` is what the phone is
    told about its charger: the battery saver cannot be switched on while charging.
    """

    undo: Step = _LEAVE_IT
    require: Step = nothing
    is_place: bool = False
    battery: Literal["reset", "unplug"] = "reset"


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
    """The lowest brightness differs between phones."""
    if wish.expected in _DARKEST:
        raise TaskError(
            f"expected a brightness that every phone has, got {wish.expected!r}: the darkest is 1 on one phone and 10 "
            "on another; ask for brightness_is_about:0"
        )
    return ""


async def move_volume(wish: Wish) -> str:
    """The middle, or one more if the middle is wanted."""
    _, minimum, maximum = parse_volume(await wish.shell.run(queries.MEDIA_VOLUME))
    middle = (minimum + maximum) // 2
    return await _set_volume(wish, middle if str(middle) != wish.expected else middle + 1)


async def move_volume_away(wish: Wish) -> str:
    """The other end."""
    _, minimum, maximum = parse_volume(await wish.shell.run(queries.MEDIA_VOLUME))
    return await _set_volume(wish, maximum if int(wish.argument) < 50 else minimum)


async def _set_volume(wish: Wish, level: int) -> str:
    return await wish.shell.run(f"cmd media_session volume --stream 3 --set {level}")


async def require_simulated_volumes(wish: Wish) -> str:
    """A volume in steps means the same only on a phone with as many steps as the simulated one."""
    _, *limits = parse_volume(await wish.shell.run(queries.MEDIA_VOLUME))
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
    granted = await queries.read_permissions(wish.shell, package)
    if granted is None:
        raise TaskError(f"expected {package!r} to be installed for {wish.query!r}; install it: adb install FILE")
    if permission not in granted:
        raise TaskError(f"expected {package!r} to ask for the permission {permission!r}, it does not: {wish.query!r}")
    return ""


async def switch_permission(wish: Wish) -> str:
    package, permission = _permission(wish)
    verb = "grant" if wish.opposite == "true" else "revoke"
    return await wish.shell.run(f"pm {verb} --user 0 {quote(package)} {quote(permission)}")


def _permission(wish: Wish) -> tuple[str, str]:
    package, _, permission = wish.argument.partition("/")
    return package, queries.full_permission(permission) if permission else queries.NOTIFY_PERMISSION


async def require_app(wish: Wish) -> str:
    """The app to open must be installed under exactly this package name."""
    package = wish.expected.partition("/")[0]
    if await queries.read_app_installed(wish.shell, package) == "false":
        raise TaskError(
            f"expected {package!r} to be installed for {wish.query!r}, it is not: makers name their own apps "
            "differently; name the package of this phone in the task"
        )
    return ""


async def refuse_app(wish: Wish) -> str:
    """Apps are not installed (there is no APK) or uninstalled (their data would be lost)."""
    if wish.opposite == "true":
        return await refuse(f"install it before the task removes it: adb install {wish.argument}.apk")(wish)
    return await refuse("uninstalling it here would delete its data: do it by hand")(wish)


async def switch_app(wish: Wish) -> str:
    package = quote(wish.argument)
    if wish.opposite == "true":
        return await wish.shell.run(f"monkey -p {package} -c android.intent.category.LAUNCHER 1")
    return await wish.shell.run(f"am force-stop {package}")


async def swap_file(wish: Wish) -> str:
    """Make the file (or folder, if its path ends with a slash), or remove it."""
    path = quote(wish.argument)
    if wish.opposite == "false":
        return await wish.shell.run(f"if [ -d {path} ]; then rmdir {path}; else rm -f {path}; fi")
    if wish.argument.endswith("/"):
        return await wish.shell.run(f"mkdir -p {path}")
    return await wish.shell.run(f"mkdir -p {quote(dirname(wish.argument))} && touch {path}")


async def swap_contact(wish: Wish) -> str:
    """Add the contact if the goal is that there is no such name; otherwise remove the one with this name and number."""
    run = wish.shell.run
    if wish.expected:
        ids = [
            row["raw_contact_id"]
            for row in await queries.read_contact_rows(wish.shell)
            if row["display_name"] == wish.argument and wish.expected in (row["data1"], queries.dialled(row["data1"]))
        ]
        return await run("; ".join(f"content delete --uri {_RAW_CONTACTS} --where _id={int(raw_id)}" for raw_id in ids))
    said = await run(f"content insert --uri {_RAW_CONTACTS} --bind account_type:s: --bind account_name:s:")
    newest = f"content query --uri {_RAW_CONTACTS} --projection _id --sort '_id DESC'"
    raw_id = int(parse_rows(await run(newest), ("_id",))[0]["_id"])
    insert = f"content insert --uri {_CONTACT_DATA} --bind raw_contact_id:i:{raw_id} --bind mimetype:s:"
    name = f"{insert}vnd.android.cursor.item/name --bind data1:s:{quote(wish.argument)}"
    phone = f"{insert}vnd.android.cursor.item/phone_v2 --bind data1:s:{quote(_EXAMPLE_NUMBER)}"
    return said + await run(f"{name}; {phone}")


async def forget_calls(wish: Wish) -> str:
    """Remove the calls to the number that the task will call."""
    rows = parse_rows(await wish.shell.run(queries.CALLS), ("number",))
    numbers = {row["number"] for row in rows if f'"{queries.dialled(row["number"])}"' == wish.expected}
    deletes = (f"type=2 and number='{number}'" for number in sorted(numbers) if "'" not in number)
    return await wish.shell.run(
        "; ".join(f"content delete --uri content://call_log/calls --where {quote(where)}" for where in deletes)
    )


async def require_lone_alarm(wish: Wish) -> str:
    """Android knows only the next alarm, so another one could hide this one."""
    others = [at for at in parse_alarm_times(await wish.shell.run(queries.ALARMS)) if at != wish.argument]
    if others:
        raise TaskError(
            f"expected a phone without other alarms for {wish.query!r}, got {', '.join(others)}; switch them off"
        )
    return ""


async def swap_alarm(wish: Wish) -> str:
    """Ask the clock app to set or dismiss the alarm with Android's alarm intents."""
    hour, minute = (int(part) for part in wish.argument.split(":"))
    extra = "android.intent.extra.alarm"
    at = f"--ei {extra}.HOUR {hour} --ei {extra}.MINUTES {minute}"
    if wish.opposite == "true":
        return await wish.shell.run(f"am start -a android.intent.action.SET_ALARM {at} --ez {extra}.SKIP_UI true")
    action = "am start -a android.intent.action.DISMISS_ALARM"
    return await wish.shell.run(f"{action} --es {extra}.SEARCH_MODE android.time {at}")


async def require_next_picture(wish: Wish) -> str:
    """A goal that counts pictures must expect exactly one more than the phone has."""
    count = int(await queries.read_android_query(wish.shell, wish.query))
    if wish.how == "equals" and wish.expected != str(count + 1):
        raise TaskError(
            f"expected a goal of one picture more than the {count} on this phone, got {wish.query!r} {wish.expected!r}"
        )
    return ""


async def post_notification(wish: Wish) -> str:
    return await wish.shell.run(_NOTIFY)


async def swap_network(wish: Wish) -> str:
    """Save a network that the task will forget; a saved network is not forgotten, which would lose its password."""
    if wish.opposite == "false":
        return await refuse("forgetting it here would lose its password: do it by hand")(wish)
    return await wish.shell.run(f"cmd wifi add-network {quote(wish.argument)} open")
