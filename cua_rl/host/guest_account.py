"""Guest accounts: a system user and an empty home for programs that must not see our keys.

Agents, harnesses, sites and their checks run in one each.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cua_rl.host.sandbox import can_sandbox, sandbox
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import GUEST_UIDS, SystemUser, claim_user
from cua_rl.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestAccount:
    """The user and the home folder that one command has to itself while it runs."""

    user: SystemUser
    home: Path

    def release(self) -> None:
        """Kill the processes that the user still runs, and remove the home."""
        self.user.release(self.home)


@asynccontextmanager
async def open_guest_account(
    argv: tuple[str, ...], name: str, inside: tuple[str, ...] = ()
) -> AsyncGenerator[GuestAccount]:
    """An account for this command, released at the end of the block; `name` is the prefix of its home's name."""
    account = await asyncio.to_thread(claim_guest_account, argv, name, inside)
    try:
        yield account
    finally:
        await asyncio.to_thread(account.release)


def claim_guest_account(argv: tuple[str, ...], name: str, inside: tuple[str, ...] = ()) -> GuestAccount:
    """An account for this command, which the caller releases; in the network that the command `inside` leads to.

    Raises:
        ConfigError: it cannot read the program, or a file among its arguments.
    """
    files = (shutil.which(argv[0]) or argv[0], *(word for word in argv[1:] if os.path.exists(word)))
    user, home = claim_user(GUEST_UIDS), make_scratch_folder(name)
    try:
        user.make_folder(home)  # it exists, and becomes the user's
        user.make_folder(home / ".tmp")
        if can_sandbox():
            user = replace(user, sandbox=(*inside, *sandbox(files, home)))
        _require_readable(files, user)
    except BaseException:
        user.release(home)
        raise
    return GuestAccount(user=user, home=home)


_readable: set[tuple[str, ...]] = set()
"""Files that a guest was seen to read."""


def _require_readable(files: tuple[str, ...], user: SystemUser) -> None:
    if files in _readable:
        return
    command = user.command(["sh", "-c", 'for file; do test -r "$file" || echo "$file"; done', "sh", *files])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or done.stdout:
        raise ConfigError(
            "expected a program and files that other users can read, because root gives programs users of their own, "
            f"got {done.stderr.strip() or ', '.join(done.stdout.split())}; move them, interpreter and packages to a "
            "folder that every user can read, or let others pass through its parents (chmod o+x) and read it "
            "(chmod o+r), or start the run as another user"
        )
    _readable.add(files)
