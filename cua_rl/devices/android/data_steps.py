"""Undoing goals about what a phone holds: apps, files, contacts, calls, alarms, pictures, notifications, networks.

What is deleted is what the goal names and nothing else: a file, an empty folder, a contact with this name and number, a
number in the list of calls.
"""

from posixpath import dirname
from shlex import quote

from cua_rl.devices.android.content_queries import CALLS, dialled, read_contact_rows
from cua_rl.devices.android.dumps import parse_alarm_times, parse_rows
from cua_rl.devices.android.package_queries import read_app_installed
from cua_rl.devices.android.queries import ALARMS, read_android_query
from cua_rl.devices.android.wish import Wish, refuse
from cua_rl.errors import TaskError

_RAW_CONTACTS = "content://com.android.contacts/raw_contacts"
_CONTACT_DATA = "content://com.android.contacts/data"
_NOTIFY = "cmd notification post -t Reminder cua_rl_$(date +%s%N) 'Water the plants'"
_EXAMPLE_NUMBER = "555 0142"


async def require_app(wish: Wish) -> str:
    """The app that should come to the front must be there, under this very name."""
    package = wish.expected.partition("/")[0]
    if await read_app_installed(wish.shell, package) == "false":
        raise TaskError(
            f"expected {package!r} to be installed for {wish.query!r}, it is not: makers name their own apps "
            "differently; name the package of this phone in the task"
        )
    return ""


async def refuse_app(wish: Wish) -> str:
    """Apps are neither installed nor uninstalled here: nobody has the file, and data would be lost."""
    if wish.opposite == "true":
        return await refuse(f"install it before the task removes it: adb install {wish.argument}.apk")(wish)
    return await refuse("uninstalling it here would delete its data: do it by hand")(wish)


async def switch_app(wish: Wish) -> str:
    """Start or stop."""
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
    """Add the contact if the goal is that nobody has this name; otherwise remove who has this name and number."""
    if not wish.expected:
        return await _add_contact(wish, _EXAMPLE_NUMBER)
    rows = await read_contact_rows(wish.shell)
    ids = [
        row["raw_contact_id"]
        for row in rows
        if row["display_name"] == wish.argument and wish.expected in (row["data1"], dialled(row["data1"]))
    ]
    return await wish.shell.run(
        "; ".join(f"content delete --uri {_RAW_CONTACTS} --where _id={int(raw_id)}" for raw_id in ids)
    )


async def _add_contact(wish: Wish, number: str) -> str:
    said = await wish.shell.run(f"content insert --uri {_RAW_CONTACTS} --bind account_type:s: --bind account_name:s:")
    newest = f"content query --uri {_RAW_CONTACTS} --projection _id --sort '_id DESC'"
    raw_id = int(parse_rows(await wish.shell.run(newest), ("_id",))[0]["_id"])
    insert = f"content insert --uri {_CONTACT_DATA} --bind raw_contact_id:i:{raw_id} --bind mimetype:s:"
    name = f"{insert}vnd.android.cursor.item/name --bind data1:s:{quote(wish.argument)}"
    phone = f"{insert}vnd.android.cursor.item/phone_v2 --bind data1:s:{quote(number)}"
    return said + await wish.shell.run(f"{name}; {phone}")


async def forget_calls(wish: Wish) -> str:
    """Remove the calls to the number that the task will call."""
    rows = parse_rows(await wish.shell.run(CALLS), ("number",))
    numbers = {row["number"] for row in rows if f'"{dialled(row["number"])}"' == wish.expected}
    deletes = (f"type=2 and number='{number}'" for number in sorted(numbers) if "'" not in number)
    return await wish.shell.run(
        "; ".join(f"content delete --uri content://call_log/calls --where {quote(where)}" for where in deletes)
    )


async def require_lone_alarm(wish: Wish) -> str:
    """Clock apps tell Android only the next alarm: another one could hide it."""
    others = [at for at in parse_alarm_times(await wish.shell.run(ALARMS)) if at != wish.argument]
    if others:
        raise TaskError(
            f"expected a phone without other alarms for {wish.query!r}, got {', '.join(others)}; switch them off"
        )
    return ""


async def swap_alarm(wish: Wish) -> str:
    """Ask the clock app to set or dismiss the alarm, in Android's words for it."""
    hour, minute = (int(part) for part in wish.argument.split(":"))
    extra = "android.intent.extra.alarm"
    at = f"--ei {extra}.HOUR {hour} --ei {extra}.MINUTES {minute}"
    if wish.opposite == "true":
        return await wish.shell.run(f"am start -a android.intent.action.SET_ALARM {at} --ez {extra}.SKIP_UI true")
    action = "am start -a android.intent.action.DISMISS_ALARM"
    return await wish.shell.run(f"{action} --es {extra}.SEARCH_MODE android.time {at}")


async def require_next_picture(wish: Wish) -> str:
    """Goals that count pictures know those of the simulated phone, or were made for what is there."""
    count = int(await read_android_query(wish.shell, wish.query))
    if wish.how == "equals" and wish.expected != str(count + 1):
        raise TaskError(
            f"expected a goal of one picture more than the {count} on this phone, got {wish.query!r} {wish.expected!r}"
        )
    return ""


async def post_notification(wish: Wish) -> str:
    """One notification more, which can be cleared."""
    return await wish.shell.run(_NOTIFY)


async def swap_network(wish: Wish) -> str:
    """Save a network that the task will forget; forgetting one that it will save would lose a password."""
    if wish.opposite == "false":
        return await refuse("forgetting it here would lose its password: do it by hand")(wish)
    return await wish.shell.run(f"cmd wifi add-network {quote(wish.argument)} open")
