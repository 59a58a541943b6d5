"""A user and an empty home for a program that has no need for our keys: agents, harnesses, sites and their checks."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cua_rl.errors import ConfigError
from cua_rl.scratch import make_scratch_folder
from cua_rl.system_users import GUEST_UIDS, SystemUser, can_change_user, claim_user, hidden_entries, remove_tree


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
    user = await asyncio.to_thread(claim_guest, argv)
    home = await asyncio.to_thread(make_scratch_folder, name)
    user.give(home)
    return GuestRoom(user=user, home=home)


def claim_guest(argv: tuple[str, ...]) -> SystemUser:
    """A user of its own for the program, where root runs this process.

    Raises:
        ConfigError: that user cannot read the program, or a file named after it.
    """
    if not can_change_user():
        return SystemUser()
    files = (shutil.which(argv[0]) or argv[0], *(word for word in argv[1:] if os.path.exists(word)))
    return claim_user(GUEST_UIDS, shown=_readable_entries(files))


@cache
def _readable_entries(files: tuple[str, ...]) -> tuple[Path, ...]:
    """What the program's user has to see of folders that only root can look into; tried with a user like it."""
    entries = hidden_entries(files)
    with claim_user(GUEST_UIDS, shown=entries) as user:
        command = user.command(["sh", "-c", 'for file; do test -r "$file" || echo "$file"; done', "sh", *files])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or done.stdout:
        raise ConfigError(
            "expected a program that other users can read, because a run that root starts gives it a user of its own, "
            f"got {done.stderr.strip() or ', '.join(done.stdout.split())}; move program, interpreter and packages to a "
            "folder that every user can read, or let others pass through its parents (chmod o+x) and read it "
            "(chmod o+r), or start the run as another user"
        )
    return entries
