"""What `content query` tells: contacts, sent messages, calls, pictures; an argument is what follows the colon."""

import json
import re
from collections.abc import Mapping

from cua_rl.devices.android.dumps import parse_rows
from cua_rl.devices.android.shell import AndroidShell

_CONTACTS = (
    "content query --uri content://com.android.contacts/data/phones --projection raw_contact_id:data1:display_name"
)
_SENT = "content query --uri content://sms --projection address:body --where 'type in (2,4,6)' --sort 'date ASC'"
CALLS = "content query --uri content://call_log/calls --projection number --where type=2 --sort 'date ASC'"
_PICTURES = "content query --uri content://media/external/images/media --projection relative_path"


async def read_contacts(shell: AndroidShell, argument: str) -> str:
    """[name, number] pairs."""
    return json.dumps([[name, number] for number, name in await _contacts(shell)])


async def read_contact_number(shell: AndroidShell, name: str) -> str:
    """The number of somebody, "" if nobody has that name."""
    return next((number for number, other in await _contacts(shell) if other == name), "")


async def read_contact_digits(shell: AndroidShell, name: str) -> str:
    """The same without spaces and dashes."""
    return dialled(await read_contact_number(shell, name))


async def read_sent_messages(shell: AndroidShell, argument: str) -> str:
    """To whom (the contact's name, or the number) and what, oldest first; those on their way count as sent."""
    messages = parse_rows(await shell.run(_SENT), ("address", "body"))
    names = dict(await _contacts(shell))
    return json.dumps([{"to": _whose(row["address"], names), "text": row["body"]} for row in messages])


async def read_calls(shell: AndroidShell, argument: str) -> str:
    """Numbers that were called, oldest first."""
    return json.dumps(await _calls(shell))


async def read_called_numbers(shell: AndroidShell, argument: str) -> str:
    """The same without spaces and dashes."""
    return json.dumps([dialled(number) for number in await _calls(shell)])


async def count_photos(shell: AndroidShell, argument: str) -> str:
    """How many pictures the camera took."""
    return str(sum(path.startswith("DCIM/") and "Screenshots" not in path for path in await _picture_paths(shell)))


async def count_screenshots(shell: AndroidShell, argument: str) -> str:
    """How many screenshots were kept."""
    return str(sum("Screenshots" in path for path in await _picture_paths(shell)))


async def read_contact_rows(shell: AndroidShell) -> list[Mapping[str, str]]:
    """Numbers of contacts: raw_contact_id, data1 (the number) and display_name."""
    return parse_rows(await shell.run(_CONTACTS), ("raw_contact_id", "data1", "display_name"))


async def _contacts(shell: AndroidShell) -> list[tuple[str, str]]:
    """(number, name)"""
    return [(row["data1"], row["display_name"]) for row in await read_contact_rows(shell)]


async def _calls(shell: AndroidShell) -> list[str]:
    return [row["number"] for row in parse_rows(await shell.run(CALLS), ("number",))]


async def _picture_paths(shell: AndroidShell) -> list[str]:
    return [row["relative_path"] for row in parse_rows(await shell.run(_PICTURES), ("relative_path",))]


def _whose(number: str, names: Mapping[str, str]) -> str:
    """The contact with this number, with or without country code; the number itself if nobody has it."""
    wanted = _significant_digits(number)
    for other, name in names.items():
        digits = _significant_digits(other)
        shorter, longer = sorted((wanted, digits), key=len)
        if wanted == digits or (len(shorter) >= 7 and longer.endswith(shorter)):
            return name
    return number


def dialled(number: str) -> str:
    """The keys that dial a number, without spaces and dashes."""
    return re.sub(r"[^\d*#+]", "", number)


def _significant_digits(number: str) -> str:
    return re.sub(r"\D", "", number).lstrip("0")
