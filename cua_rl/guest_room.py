"""A user and an empty home for a program that has no need for our keys: agents, harnesses, sites and their checks."""

import asyncio
import logging
import os
import shutil
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cua_rl.scratch import make_scratch_folder
from cua_rl.system_users import GUEST_UIDS, SystemUser, can_change_user, claim_user, remove_tree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestRoom:
    """What a command has to itself while it runs."""

    user: SystemUser
    home: Path

    def leave(self) -> None:
        """Kill what the user still runs and remove the home."""
        self.user.release()
        remove_tree(self.home)


@asynccontextmanager
async def open_room(argv: tuple[str, ...], name: str) -> AsyncGenerator[GuestRoom]:
    """A room for this command, left at the end; `name` begins the name of its home."""
    room = await enter_room(argv, name)
    try:
        yield room
    finally:
        await asyncio.to_thread(room.leave)


async def enter_room(argv: tuple[str, ...], name: str) -> GuestRoom:
    """A room that the caller leaves."""
    user = await asyncio.to_thread(_claim_user, argv)
    home = await asyncio.to_thread(make_scratch_folder, name)
    user.give(home)
    return GuestRoom(user=user, home=home)


def _claim_user(argv: tuple[str, ...]) -> SystemUser:
    """A user of its own for the program, or ours without capabilities if its own could not read the program."""
    if any(map(_is_closed, _files_of(argv))):
        return SystemUser(uid=os.geteuid())
    return claim_user(GUEST_UIDS)


def unreadable_files(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The program and files named after it that a user of its own cannot read; the log says so once for each."""
    return tuple(filter(_is_closed, _files_of(argv)))


def _files_of(argv: tuple[str, ...]) -> list[str]:
    return [shutil.which(argv[0]) or argv[0], *(word for word in argv[1:] if os.path.exists(word))]


@cache
def _is_closed(file: str) -> bool:
    if not can_change_user():
        return False
    with claim_user(GUEST_UIDS) as user:
        is_closed = subprocess.run(user.command(["test", "-r", file]), check=False).returncode != 0
    if is_closed:
        logger.warning(
            "a program runs as root, without capabilities, and can read and write root's files: a user of its own "
            "cannot read %s; move program, interpreter and packages to a folder that every user can read, let others "
            "pass through its parents (chmod o+x), or start the run as another user",
            file,
        )
    return is_closed
