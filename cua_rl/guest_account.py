"""Guest accounts: a system user and an empty home for programs that must not see our keys.

Agents, harnesses, sites and their checks run in one each.
"""

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
from cua_rl.system_users import GUEST_UIDS, SystemUser, can_change_user, claim_user, hidden_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestAccount:
    """The user and the home folder that one command has to itself while it runs."""

    user: SystemUser
    home: Path

    def release(self) -> None:
        """Kill the processes that the user still runs, and remove the home."""
        self.user.release(self.home)


@asynccontextmanager
async def open_guest_account(argv: tuple[str, ...], name: str) -> AsyncGenerator[GuestAccount]:
    """An account for this command, released at the end of the block; `name` is the prefix of its home's name."""
    account = await claim_guest_account(argv, name)
    try:
        yield account
    finally:
        await asyncio.to_thread(account.release)


async def claim_guest_account(argv: tuple[str, ...], name: str) -> GuestAccount:
    """An account for this command, which the caller releases."""
    user = await asyncio.to_thread(claim_guest_user, argv)
    home = await asyncio.to_thread(make_scratch_folder, name)
    user.give(home)
    return GuestAccount(user=user, home=home)


def claim_guest_user(argv: tuple[str, ...]) -> SystemUser:
    """A guest user for this command if root runs this process, else the current user.

    Raises:
        ConfigError: a guest cannot read the program, or a file among its arguments.
    """
    if not can_change_user():
        return SystemUser()
    files = (shutil.which(argv[0]) or argv[0], *(word for word in argv[1:] if os.path.exists(word)))
    return claim_user(GUEST_UIDS, shown=_readable_entries(files))


@cache
def _readable_entries(files: tuple[str, ...]) -> tuple[Path, ...]:
    """The entries of root-only folders that a guest needs in order to read the files; checked as a guest."""
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
