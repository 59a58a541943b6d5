"""The network of a run's sites: a loopback interface only for them, their browsers and their checks."""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cua_rl.environments.browser import site_relay
from cua_rl.host.guest_account import open_guest_account
from cua_rl.host.processes import OwnedProcess
from cua_rl.host.sandbox import can_sandbox, join_sandbox, sandbox_to_join
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import bare_environment
from cua_rl.types.errors import DeviceError

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteNetwork:
    """Where sites listen; by default on the loopback interface of the machine, which all its users reach."""

    inside: tuple[str, ...] = ()
    """The beginning of a command that runs the rest in the network."""
    relay: str | None = None
    """The Unix socket that leads requests into it."""

    def client(self) -> "httpx.AsyncClient":
        """Makes requests in the network, without a time limit."""
        import httpx

        # nothing is encrypted here, and loading certificates takes as long as ten requests
        transport = httpx.AsyncHTTPTransport(uds=self.relay, verify=False)
        return httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)


@asynccontextmanager
async def open_site_network(other_urls: Collection[str] = ()) -> AsyncGenerator[SiteNetwork]:
    """One of its own; the machine's if pages request other addresses, or without namespaces. Raises `DeviceError`."""
    if other_urls:
        logger.warning("other users of the machine can reach the sites: pages need its network for %s", other_urls)
    if other_urls or not await asyncio.to_thread(can_sandbox):
        yield SiteNetwork()
        return
    command = (sys.executable, "-P", site_relay.__file__)
    async with open_guest_account(command, "net") as account:
        relay = account.home / "relay"
        box = sandbox_to_join(command, account.home / ".tmp", account.home)
        process = OwnedProcess(
            [*command, str(relay)],
            name="site-network",
            log_path=make_scratch_folder("log") / "output.log",
            environment=bare_environment(account.home),
            user=replace(account.user, sandbox=tuple(box)),
        )
        async with process:
            while not await asyncio.to_thread(relay.exists):
                if not process.is_running:
                    raise DeviceError(f"expected a network for sites, got none: {process.log_tail(5)}")
                await asyncio.sleep(_POLL_S)
            yield SiteNetwork(inside=tuple(join_sandbox(process.command_pid(), "net")), relay=str(relay))
