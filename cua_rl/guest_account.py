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

from cua_rl.errors import ConfigError
from cua_rl.sandbox import can_sandbox, sandbox
from cua_rl.scratch import make_scratch_folder
from cua_rl.system_users import GUEST_UIDS, SystemUser, claim_user, remove_tree


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
    account = await claim_guest_account(argv, name, inside)
    try:
        yield account
    finally:
        await asyncio.to_thread(account.release)


async def claim_guest_account(argv: tuple[str, ...], name: str, inside: tuple[str, ...] = ()) -> GuestAccount:
    """An account for this command, which the caller releases; `inside` is the network of its sandbox."""
    home = await asyncio.to_thread(make_scratch_folder, name)
    try:
        user = await asyncio.to_thread(_claim_guest_user, argv, home)
        return GuestAccount(user=replace(user, sandbox=(*inside, *user.sandbox)), home=home)
    except BaseException:
        await asyncio.to_thread(remove_tree, home)
        raise


def require_readable(argv: tuple[str, ...]) -> None:
    """Raise `ConfigError` if a guest cannot read the program, or a file among its arguments."""
    home = make_scratch_folder("agent")
    try:
        _claim_guest_user(argv, home).release()
    finally:
        remove_tree(home)


def _claim_guest_user(argv: tuple[str, ...], home: Path) -> SystemUser:
    """A guest user for this command if root runs this process, else the current user; in a sandbox if possible."""
    files = (shutil.which(argv[0]) or argv[0], *(word for word in argv[1:] if os.path.exists(word)))
    user = claim_user(GUEST_UIDS)
    try:
        user.make_folder(home)
        user.make_folder(home / ".tmp")
        if can_sandbox():
            user = replace(user, sandbox=tuple(sandbox(files, home)))
        _require_readable(files, user)
    except BaseException:
        user.release()
        raise
    return user


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
