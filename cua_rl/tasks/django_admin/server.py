"""A Django site: its process, folder and database."""

import asyncio
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cua_rl.errors import DeviceError, TaskError, boundary
from cua_rl.processes import OwnedProcess
from cua_rl.tasks.django_admin.state import DATABASE, PORT, SiteState, read_state, write_state

_START_TIMEOUT_S = 120.0
_POLL_S = 0.02
_MODULE = "cua_rl.tasks.django_admin.site_process"


async def make_empty_database(folder: Path) -> Path:
    """The database that every site begins with; raises `DeviceError`."""
    process = _site_process(folder, "make")
    async with process:
        if await process.wait() != 0:
            raise DeviceError(f"expected Django to make a database, it ended with an error:\n{process.log_tail(10)}")
    return folder / DATABASE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdminSite:
    """A running site, which belongs to a page while that is in use."""

    process: OwnedProcess
    folder: Path
    empty_database: Path
    port: int
    idle: "list[AdminSite]"
    """Where it waits for the next page."""

    @property
    def url(self) -> str:
        """Beginning of all its addresses."""
        return f"http://127.0.0.1:{self.port}/"

    async def reset(self, state: SiteState) -> None:
        """Put its database back, holding this state and nothing else."""
        with boundary(DeviceError, "put the site's database back"):
            await asyncio.to_thread(_reset, self.empty_database, self.folder, state)

    async def answer(self, name: str) -> str:
        """Answer a query about the database; raises `TaskError` for anything but "site_state"."""
        if name != "site_state":
            raise TaskError(f"expected a query of the admin site, such as 'site_state', got {name!r}")
        with boundary(TaskError, "read the site's database"):
            return (await asyncio.to_thread(read_state, self.folder / DATABASE)).as_json()

    async def release(self, *, is_clean: bool = True) -> None:
        """Leave it to the next page, if it still runs and no page can change it any more."""
        if self.process.is_running and is_clean:
            self.idle.append(self)
        else:
            await self.stop()

    async def stop(self) -> None:
        """End it and delete its folder."""
        await self.process.stop()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


async def start_site(empty_database: Path, idle: list[AdminSite]) -> AdminSite:
    """Start a site beside the empty database; released, it joins the `idle` ones. Raises `DeviceError`."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=empty_database.parent))
    await asyncio.to_thread(shutil.copyfile, empty_database, folder / DATABASE)
    process = _site_process(folder, "serve")
    await process.start()
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not await asyncio.to_thread((folder / PORT).is_file):
                if not process.is_running:
                    raise DeviceError(f"expected the admin site to start, it ended:\n{process.log_tail(10)}")
                await asyncio.sleep(_POLL_S)
            port = int(await asyncio.to_thread((folder / PORT).read_text, encoding="utf-8"))
    except BaseException as error:
        await process.stop()
        if isinstance(error, TimeoutError):
            raise DeviceError(f"expected the admin site to start within {_START_TIMEOUT_S:g} s, it did not") from None
        raise
    return AdminSite(process=process, folder=folder, empty_database=empty_database, port=port, idle=idle)


def _site_process(folder: Path, order: str) -> OwnedProcess:
    command = [sys.executable, "-m", _MODULE, str(folder), order]
    return OwnedProcess(command, name=f"admin-site-{order}", log_path=folder / "site.log", stop_timeout_s=2.0)


def _reset(empty_database: Path, folder: Path, state: SiteState) -> None:
    """In one rename: a request that is still running keeps the file that it has open."""
    new = folder / f"{DATABASE}.new"
    shutil.copyfile(empty_database, new)
    write_state(new, state)
    for leftover in folder.glob(f"{DATABASE}-*"):
        leftover.unlink()
    new.replace(folder / DATABASE)
