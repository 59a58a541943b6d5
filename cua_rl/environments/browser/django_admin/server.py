"""A Django site: a served site, whose database we restore and read."""

import asyncio
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from cua_rl.environments.browser.django_admin.state import ADMINISTRATOR, DATABASE, SiteState, read_state, write_state
from cua_rl.environments.browser.served_site import ServedSite
from cua_rl.environments.browser.settings import SiteProgram
from cua_rl.host.processes import OwnedProcess
from cua_rl.host.users import bare_environment
from cua_rl.types.errors import DeviceError, TaskError, boundary

_FOLDER = Path(__file__).parent
_COMMAND = (sys.executable, "-P", str(_FOLDER / "site_process.py"), DATABASE, ADMINISTRATOR)
SITE = SiteProgram(command=f"{shlex.join(_COMMAND)} {{port}}", folder=_FOLDER, reset="")


async def make_empty_database(folder: Path) -> Path:
    """The database that every site begins with; raises `DeviceError`."""
    log = folder / "site.log"
    async with OwnedProcess(_COMMAND, name="admin-make", log_path=log, environment=bare_environment(folder)) as process:
        if await process.wait() != 0:
            raise DeviceError(f"expected Django to make a database, it ended with an error:\n{process.log_tail(10)}")
    return folder / DATABASE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdminSite:
    """A running site, which belongs to a page while that is in use; a `PageSite`."""

    served: ServedSite
    empty_database: Path

    @property
    def url(self) -> str:
        """Beginning of all its addresses."""
        return self.served.url

    async def reset(self, state: SiteState) -> None:
        """Restore its database with this state and nothing else."""
        with boundary(DeviceError, "put the site's database back"):
            await asyncio.to_thread(self._reset, state)

    async def answer(self, name: str) -> str:
        """Answer a query about the database; raises `TaskError` for anything but "site_state"."""
        if name != "site_state":
            raise TaskError(f"expected a query of the admin site, such as 'site_state', got {name!r}")
        with boundary(TaskError, "read the site's database"):
            return (await asyncio.to_thread(read_state, self.served.account.home / DATABASE)).as_json()

    async def release(self, *, is_clean: bool = True) -> None:
        """Leave it to the next page, if it still runs and no page can change it any more."""
        await self.served.release(is_clean=is_clean)

    def _reset(self, state: SiteState) -> None:
        """In one rename: a request that is still running keeps the file that it has open."""
        home = self.served.account.home
        new = self.empty_database.with_name(home.name)  # not in the home, where the site could put a link
        shutil.copyfile(self.empty_database, new)
        write_state(new, state)
        self.served.account.user.give(new)
        for leftover in home.glob(f"{DATABASE}-*"):
            leftover.unlink()
        new.replace(home / DATABASE)
