"""Servers of the user's own web sites: one per browser page, started, reset between rollouts and stopped by us."""

import asyncio
import logging
import os
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from cua_rl.environments.browser.settings import RESET_METHODS, SiteProgram
from cua_rl.environments.browser.site_network import SiteNetwork
from cua_rl.host.guest_account import GuestAccount, claim_guest_account, open_guest_account
from cua_rl.host.process_guard import MAX_RESULT_BYTES
from cua_rl.host.processes import OwnedProcess, Report, free_port
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import bare_environment, remove_tree
from cua_rl.types.errors import DeviceError, TaskError, UnusableError, boundary

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_RESET_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 2.0
_FIRST_SIGNAL = 128  # exit statuses above are those of programs that a signal ended, as for want of memory
_POLL_S = 0.02
_PYTHON = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
"""Its folder may belong to other users, and the log of a killed program should be complete."""
_MACHINE = SiteNetwork()
_NUM_PORTS_TRIED = 3  # another program may take a port before the server binds it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedSite:
    """A running server, used by one page at a time; a `PageSite`."""

    program: SiteProgram
    port: int
    process: OwnedProcess
    account: GuestAccount
    servers: "SiteServers" = field(repr=False)

    @property
    def address(self) -> str:
        """Without a slash at the end, as verifiers expect it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The prefix of all its addresses."""
        return f"{self.address}/"

    async def answer(self, name: str) -> str:
        """The page answers all queries; raises `TaskError`."""
        raise TaskError(f"expected a query that a page answers, such as 'title', got {name!r}; correct the task")

    def require_running(self) -> None:
        """Raise `DeviceError` if the server has ended, because the page then does not show the agent's work.

        It has started and answered, so if it ended by itself, then by what the agent did: that is an `UnusableError`.
        """
        status = self.process.exit_status
        if status is not None:
            kind = UnusableError if status < _FIRST_SIGNAL else DeviceError
            raise kind(
                f"expected the site to run until the rollout ends, it ended with status {status}: "
                f"{self.process.log_tail(5)}"
            )

    async def reset(self) -> None:
        """Restore the initial state for the next rollout; raises `DeviceError`."""
        if self.program.reset:
            await asyncio.to_thread(os.truncate, self.process.log_path, 0)  # the log is kept for one rollout only
            await self._do(self.program.reset)

    async def snapshot(self) -> bytes | None:
        """See `CopiedSite`."""
        if self.program.snapshot is None:
            return None
        self.require_running()
        state = await self._do(self.program.snapshot)
        if not 0 < len(state) <= MAX_RESULT_BYTES:
            kind = UnusableError if state else DeviceError  # it may have grown by what the policy did
            raise kind(
                f"expected 1 to {MAX_RESULT_BYTES:,} bytes of state from {self.program.snapshot!r}, got {len(state):,}"
            )
        return state

    async def restore(self, state: bytes) -> None:
        """See `CopiedSite`."""
        await self._do(self.program.restore or "", state)
        if await self.snapshot() != state:
            raise DeviceError(
                f"expected {self.program.snapshot!r} to give the state that {self.program.restore!r} got, it gave "
                "another; correct one of them"
            )

    async def release(self, *, is_clean: bool = True) -> None:
        """Give it back, or stop it if a script of the last page might still change its state."""
        await (self.servers.give_back if is_clean else self.servers.end)(self)

    async def _do(self, order: str, state: bytes | None = None) -> bytes:
        """Send a request and return its answer, or run a command and return what it wrote as a state."""
        method, _, path = order.partition(" ")
        try:
            async with asyncio.timeout(_RESET_TIMEOUT_S):
                if method not in RESET_METHODS:
                    return await self._run(order, state)
                with boundary(DeviceError, f"ask the site for {order!r}"):
                    async with self.servers.network.client() as client:
                        response = await client.request(method, f"{self.address}{path.strip()}", content=state)
        except TimeoutError:
            raise DeviceError(f"expected {order!r} to end within {_RESET_TIMEOUT_S:g} s, it did not") from None
        if not response.is_success:
            raise DeviceError(
                f"expected the site to do {order!r}, it answered {response.status_code}: {response.text[:200]!r}; "
                "correct it"
            )
        return response.content

    async def _run(self, order: str, state: bytes | None) -> bytes:
        argv = split_command(order, port=self.port, url=self.address)
        told, inside = {"CUA_SITE_URL": self.address}, self.servers.network.inside
        with tempfile.TemporaryFile() as taken:
            status, said = await run_guest(argv, self.program.folder, told, inside, state=state, taken=taken)
            taken.seek(0)
            found, _, content = (await asyncio.to_thread(taken.read)).partition(b"\n")
        if status != 0:
            raise DeviceError(
                f"expected the site to do {order!r}, it ended with status {status}: {said.strip()[-500:]}"
            )
        return content if found == b"written" else b""


def split_command(command: str, *, port: int, url: str) -> tuple[str, ...]:
    """The words of a command as a shell would split them, with `{port}` and `{url}` filled in."""
    return tuple(word.replace("{port}", str(port)).replace("{url}", url) for word in shlex.split(command))


class SiteServers:
    """The servers of a run in one network: one per page in use, reused if they can be reset."""

    def __init__(self, network: SiteNetwork = _MACHINE) -> None:
        self.network = network
        self._idle: list[ServedSite] = []
        self._running: set[ServedSite] = set()

    async def take(self, program: SiteProgram) -> ServedSite:
        """A server of this site for one page: an idle one, reset, or a new one. Raises `DeviceError`."""
        for dead in [site for site in self._idle if not site.process.is_running]:
            self._idle.remove(dead)
            await self.end(dead)
        found = next((site for site in self._idle if site.program == program), None)
        if found is not None:
            self._idle.remove(found)
            try:
                await found.reset()
            except BaseException:
                await self.end(found)
                raise
            return found
        if self._idle:  # stop one of another site, so that there are no more servers than pages
            await self.end(self._idle.pop(0))
        return await self.start(program)

    async def start(self, program: SiteProgram) -> ServedSite:
        """A new server, once it answers; raises `DeviceError`."""
        said = ""
        for _ in range(_NUM_PORTS_TRIED):
            site = await self._launch(program)
            try:
                if await _answers(site):
                    if not self.network.inside:
                        await _warn_if_open(site)
                    return site
                said = await asyncio.to_thread(site.process.log_tail, 10)
            except BaseException:
                await self.end(site)
                raise
            await self.end(site)
        raise DeviceError(
            f"expected site_command {program.command!r} to serve the site, it ended (in {str(program.folder)!r}): "
            f"{said.strip() or 'it printed nothing'}"
        )

    async def give_back(self, site: ServedSite) -> None:
        """Keep it for the next page if it is running and can be reset, else stop it."""
        if site.process.is_running and site.program.reset is not None:
            self._idle.append(site)
        else:
            await self.end(site)

    async def close(self) -> None:
        """End all servers."""
        self._idle.clear()
        await asyncio.gather(*(self.end(site) for site in list(self._running)))

    async def _launch(self, program: SiteProgram) -> ServedSite:
        files = _named_files(split_command(program.command, port=0, url=""), program.folder)
        account = await asyncio.to_thread(claim_guest_account, files, "site", self.network.inside)
        while (port := free_port()) in {site.port for site in self._running}:  # some are starting
            pass
        argv = split_command(program.command, port=port, url=f"http://127.0.0.1:{port}")
        process = _make_process(argv, account, program.folder, {})
        site = ServedSite(program=program, port=port, process=process, account=account, servers=self)
        self._running.add(site)
        try:
            await process.start()
        except BaseException:
            await self.end(site)
            raise
        return site

    async def end(self, site: ServedSite) -> None:
        """Stop it and all processes that it started, and remove its home; safe to call twice."""
        await site.process.stop()
        await asyncio.to_thread(site.account.release)
        await asyncio.to_thread(remove_tree, site.process.log_path.parent)
        self._running.discard(site)


async def run_guest(
    argv: tuple[str, ...],
    folder: Path,
    told: Mapping[str, str],
    inside: tuple[str, ...] = (),
    *,
    state: bytes | None = None,
    taken: BinaryIO | None = None,
) -> tuple[int, str]:
    """Run a program in a guest account; returns exit status and end of its output. If cancelled, end the program.

    At CUA_STATE_PATH it finds `state`, or leaves one; `taken` gets what is there at its end, as `Report` says.
    """
    async with open_guest_account(_named_files(argv, folder), "check", inside) as account:
        path = account.home / "state"
        if state is not None:
            await asyncio.to_thread(path.write_bytes, state)
        report = None if taken is None else Report(path=path, taken=taken)
        process = _make_process(argv, account, folder, {**told, "CUA_STATE_PATH": str(path)}, report)
        try:
            async with process:
                status = await process.wait()
            return status, await asyncio.to_thread(process.log_tail, 20)
        finally:
            await asyncio.to_thread(remove_tree, process.log_path.parent)


def _make_process(
    argv: tuple[str, ...], account: GuestAccount, folder: Path, told: Mapping[str, str], report: Report | None = None
) -> OwnedProcess:
    """The process, without our environment; its log is in a folder that it cannot access."""
    return OwnedProcess(
        argv,
        name=Path(argv[0]).name,
        log_path=make_scratch_folder("log") / "output.log",
        environment=bare_environment(account.home, {**_PYTHON, **told}),
        folder=folder,
        stop_timeout_s=_STOP_TIMEOUT_S,
        user=account.user,
        report=report,
    )


def _named_files(argv: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """The command, its folder, and its arguments with files as absolute paths: what its user must be able to read."""
    return (argv[0], str(folder), *(str(folder / word) if (folder / word).is_file() else word for word in argv[1:]))


async def _answers(site: ServedSite) -> bool:
    """Wait for the first response, of any status; False if the server ends first. Raises `DeviceError` on timeout."""
    import httpx

    try:
        async with asyncio.timeout(_START_TIMEOUT_S), site.servers.network.client() as client:
            while site.process.is_running:
                try:
                    await client.get(site.url)
                except httpx.TransportError:
                    await asyncio.sleep(_POLL_S)
                else:
                    return site.process.is_running  # the answer may be of another program, which has taken the port
    except TimeoutError:
        raise DeviceError(
            f"expected the site to answer on port {site.port} within {_START_TIMEOUT_S:g} s, it did not; check that "
            f"site_command passes {{port}} on, and serves by itself (docs/web.md): {site.process.log_tail(5)}"
        ) from None
    return False


async def _warn_if_open(site: ServedSite) -> None:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            # another address of the loopback interface, on which a server of 127.0.0.1 only does not listen
            _, writer = await asyncio.open_connection("127.0.0.2", site.port)
        writer.close()
        logger.warning(
            "site_command %r: expected a server only on 127.0.0.1, got one on all addresses (0.0.0.0:%d), which "
            "other machines may reach; let it bind 127.0.0.1",
            site.program.command,
            site.port,
        )
