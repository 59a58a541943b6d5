"""The client of the model servers: publishes, verifies and unloads adapters, and routes requests to replicas."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Self
from uuid import uuid4

from cua_rl.sampling.canary import Canary
from cua_rl.sampling.generation import GENERATE_PATH, Generated, GenerateParams, draw_samples
from cua_rl.sampling.load import ServerLoad, fullest
from cua_rl.sampling.replica import Replica, ReplicaLost
from cua_rl.sampling.sampler import Sampled, TurnRequest
from cua_rl.sampling.server import ModelServer, ServedModel, require_one_version
from cua_rl.sampling.vllm_responses import RESPONSES_PATH, parse_sampled
from cua_rl.types.errors import ConfigError, CuaError, SamplingError, boundary
from cua_rl.types.rollout import AdapterRef, ModelInput

logger = logging.getLogger(__name__)

_MAX_MOVES = 2
"""Replicas that may be lost while they serve one request; with one more, the request is assumed to be the cause."""
_MAX_UNHEALTHY = 3
"""Consecutive failed health checks after which a replica counts as lost."""
_CHECKS_PER_LOG_LINE = 6  # attempts to rejoin between two lines in the log: half a minute


class SamplingClient:
    """Requests to one or more replicas of the model server; an async context manager.

    All requests of a rollout go to one replica, which has its earlier turns cached; a new rollout goes to the replica
    with the fewest rollouts. A replica that does not answer, or no longer has its adapters, is taken out of service.
    Its rollouts continue on others; while there are none, they wait for at most `outage_timeout_s`.

    A replica rejoins once it has passed the canary of the current adapter; only then are adapters loaded there under
    their names. A client that follows another one loads none. So no process samples from a server that is not proven.

    An answer may take as long as it needs while its server makes progress; without any for `stall_timeout_s`, the
    request fails. A request that fails in transit is retried, because sampling has no effect until the answer is
    recorded. On the servers, names of adapters end with the client's `namespace`, so that runs which use the same
    server, at the same time or one after the other, never share adapters or cached prompts.

    With more than `max_adapters` on a server, the least recently used ones leave it, but none in use, and come back
    with the next request for them. Without that limit they stay until the next publication.

    Raises `ConfigError` if the servers are of different versions: their log-probabilities would differ.
    """

    def __init__(
        self,
        *servers: ModelServer,
        namespace: str | None = None,
        max_attempts: int = 10,
        stall_timeout_s: float = 300.0,
        check_interval_s: float = 5.0,
        outage_timeout_s: float = 600.0,
        max_adapters: int | None = None,
    ) -> None:
        if not servers:
            raise ConfigError("expected at least one model server, got none")
        require_one_version(servers)
        self.namespace = uuid4().hex[:8] if namespace is None else namespace
        self._replicas = [
            Replica(
                server,
                namespace=self.namespace,
                max_attempts=max_attempts,
                stall_timeout_s=stall_timeout_s,
                has_siblings=len(servers) > 1,
            )
            for server in servers
        ]
        self._check_interval_s = check_interval_s
        self._outage_timeout_s = outage_timeout_s
        self._max_adapters = max_adapters
        self._homes: dict[str, Replica] = {}
        self._uses: Counter[AdapterRef] = Counter()
        self._canary: Canary | None = None
        self._publishing = asyncio.Lock()
        self._in_service = asyncio.Event()
        self._in_service.set()
        self._watches: list[asyncio.Task[None]] = []
        self.current: AdapterRef | None = None
        """The announced adapter, which serves new requests; None, the base model, until one is published."""

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt plus answer on every replica, tokens."""
        return min(replica.server.model.max_model_len for replica in self._replicas)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas in service."""
        return tuple(replica for replica in self._replicas if not replica.is_lost)

    async def publish(self, adapter: AdapterRef, canary: Canary | None = None) -> None:
        """Load an adapter, prove it, announce it, unload unused ones; raises `AdapterError` or `SamplingError`."""

        async def prove(replica: Replica) -> None:
            if canary is not None:
                await replica.prove(adapter, canary)

        async def load_and_announce() -> None:
            clock = time.monotonic()
            await self._everywhere(lambda replica: replica.is_healthy(replica.loaded))
            await self._everywhere(lambda replica: replica.load(adapter))
            try:
                await self._everywhere(prove)
            except BaseException:
                await self._wherever_possible(lambda replica: replica.unload(adapter))
                raise
            self.current, self._canary = adapter, canary
            published_on, publish_s = f"{len(self.replicas)} of {len(self._replicas)}", time.monotonic() - clock
            logger.info("published adapter=%s servers=%s publish_s=%.3f", adapter.name, published_on, publish_s)
            await self._wherever_possible(lambda replica: replica.unload_all_but({adapter, *self._uses}))

        await self._while_none_rejoins(load_and_announce)

    async def probe(self, adapter: AdapterRef, canary: Canary) -> tuple[float, float]:
        """Load an adapter without announcing it, verify it with the canary on every replica, and unload it.

        Returns the values of `check_canary` for the replica that differs most from the trainer; the difference is 0 if
        the canary has none of the trainer's numbers.

        Raises `AdapterError` if a server cannot load it, or the canary fails, `SamplingError` if no server answers.
        """
        proofs: list[tuple[float, float]] = []

        async def prove(replica: Replica) -> None:
            change, difference = await replica.prove(adapter, canary)
            proofs.append((change, difference or 0.0))

        async def load_and_prove() -> None:
            await self._everywhere(lambda replica: replica.load(adapter))
            try:
                await self._everywhere(prove)
            finally:
                await self._wherever_possible(lambda replica: replica.unload(adapter))

        await self._while_none_rejoins(load_and_prove)
        return max(proofs, key=lambda proof: proof[1])

    def pin(self, adapter: AdapterRef) -> None:
        """Keep an adapter until `unpin`; pins are counted."""
        self._uses[adapter] += 1

    def unpin(self, adapter: AdapterRef) -> None:
        """Undo one `pin`; the next publication unloads the adapter if it has no other use."""
        self._uses[adapter] -= 1
        if self._uses[adapter] <= 0:
            del self._uses[adapter]

    @asynccontextmanager
    async def pinned(self, adapter: AdapterRef) -> AsyncGenerator[AdapterRef]:
        """Keep an adapter loaded regardless of publications, for evaluations."""
        self.pin(adapter)
        try:
            await self._while_none_rejoins(lambda: self._everywhere(lambda replica: replica.load(adapter)))
            yield adapter
        finally:
            self.unpin(adapter)

    async def respond(
        self, path: str, payload: Mapping[str, object], *, adapter: AdapterRef | None = None, sticky_key: str = ""
    ) -> tuple[Mapping[str, object], AdapterRef | None]:
        """Post for this adapter, else the current one, and return it with the answer; equal keys reach one replica.

        Raises `SamplingError`.
        """
        used = adapter or self.current
        if used is not None:
            self.pin(used)
        try:
            for num_moves in range(_MAX_MOVES + 1):
                replica = await self._replica_for(sticky_key)
                replica.num_requests += 1
                try:
                    if used is not None:
                        if self._max_adapters is not None and used not in replica.loaded:
                            await replica.unload_all_but(self._uses, num_kept=self._max_adapters - 1)
                        await replica.load(used)
                    name = replica.server.model.name if used is None else replica.name_of(used)
                    return await replica.sample(name, path, payload), used
                except ReplicaLost as lost:
                    await self._lose(replica, lost)
                    if num_moves == _MAX_MOVES:
                        raise
                finally:
                    replica.num_requests -= 1
            raise AssertionError("unreachable: the last move returns or raises")
        finally:
            if used is not None:
                self.unpin(used)

    async def sample_turn(
        self, turn: TurnRequest, *, adapter: AdapterRef | None = None, sticky_key: str = ""
    ) -> tuple[Sampled, AdapterRef | None]:
        """The answer of a turn and the adapter that gave it, as `respond`."""
        body, used = await self.respond(RESPONSES_PATH, turn.payload, adapter=adapter, sticky_key=sticky_key)
        return parse_sampled(body), used

    async def generate(
        self,
        prompt: ModelInput,
        params: GenerateParams,
        *,
        image_token_id: int,
        adapter: AdapterRef | None = None,
        sticky_key: str = "",
    ) -> Generated:
        """Continue a prompt with this adapter, else the current one; raises as `draw_samples`."""

        async def ask(request: Mapping[str, object]) -> Mapping[str, object]:
            return (await self.respond(GENERATE_PATH, request, adapter=adapter, sticky_key=sticky_key))[0]

        return await draw_samples(ask, prompt, params, image_token_id)

    def forget(self, sticky_key: str) -> None:
        """The rollout with this key is over."""
        self._homes.pop(sticky_key, None)

    async def fetch_load(self) -> ServerLoad:
        """Combined load of the replicas in service; raises `SamplingError` if one does not report it."""
        await self._wait_for_service()
        return fullest(await asyncio.gather(*(replica.fetch_load() for replica in self.replicas)))

    async def measure_speed(self, tokens: Sequence[int]) -> float:
        """Tokens per second of one answer, from the slowest replica in service; raises `SamplingError`."""
        await self._wait_for_service()
        return min(await asyncio.gather(*(replica.measure_speed(tokens) for replica in self.replicas)))

    @property
    def used(self) -> frozenset[AdapterRef]:
        """Adapters that a request or a pin needs now."""
        return frozenset(self._uses)

    @property
    def _needed(self) -> frozenset[AdapterRef]:
        return self.used if self.current is None else self.used | {self.current}

    @property
    def addresses(self) -> tuple[tuple[str, str | None, ServedModel], ...]:
        """Address and key of each server, and what it serves."""
        servers = [replica.server for replica in self._replicas]
        return tuple((server.base_url, server.api_key, server.model) for server in servers)

    def follow(self, adapter: AdapterRef) -> None:
        """Send new requests to an adapter that another process proves, loads and unloads; this client loads none."""
        self.current = adapter
        for replica in self._replicas:
            replica.loads_adapters = False

    async def __aenter__(self) -> Self:
        for replica in self._replicas:
            url, model = replica.server.base_url, replica.server.model
            logger.info("model server url=%s model=%s vllm=%s", url, model.root or model.name, model.version)
            self._watches.append(asyncio.create_task(self._watch(replica), name=f"watch-{url}"))
        return self

    async def __aexit__(self, *error: object) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for replica in self._replicas:
            await replica.close()

    async def _while_none_rejoins(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` while no replica can rejoin; repeat it if all replicas are lost meanwhile."""
        # The lock is not held while it waits for a replica in service, because rejoining takes the lock.
        num_lost = 0
        while True:
            await self._wait_for_service()
            async with self._publishing:
                try:
                    return await work()
                except ReplicaLost:
                    num_lost += 1
                    if num_lost > _MAX_MOVES:
                        raise
                    logger.warning("all model servers are lost, starting over when one is back")

    async def _everywhere(self, work: Callable[[Replica], Awaitable[object]]) -> None:
        """Run `work` on the replicas in service; lost ones catch up later. Raises `ReplicaLost` if none is left."""
        replicas = self.replicas
        ends = await asyncio.gather(*(work(replica) for replica in replicas), return_exceptions=True)
        for replica, end in zip(replicas, ends, strict=True):
            if isinstance(end, ReplicaLost):
                await self._lose(replica, end)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, ReplicaLost):
                raise end
        if all(isinstance(end, ReplicaLost) for end in ends):
            raise next((end for end in ends if isinstance(end, ReplicaLost)), ReplicaLost("no model server answers"))

    async def _wherever_possible(self, work: Callable[[Replica], Awaitable[object]]) -> None:
        """Run `work` on the replicas in service, if any; the others catch up when they rejoin."""
        with suppress(ReplicaLost):
            await self._everywhere(work)

    async def _replica_for(self, sticky_key: str) -> Replica:
        await self._wait_for_service()
        home = self._homes.get(sticky_key)
        if home is None or home.is_lost:
            homes = Counter(map(id, self._homes.values()))
            home = min(self.replicas, key=lambda replica: (homes[id(replica)], replica.num_requests))
            if sticky_key:
                self._homes[sticky_key] = home
        return home

    async def until_given_up(self) -> None:
        """Wait until no model server is left; raises the `SamplingError` that says why."""
        await asyncio.wait(self._watches)
        await self._wait_for_service()

    async def _wait_for_service(self) -> None:
        try:
            async with asyncio.timeout(self._outage_timeout_s):
                await self._in_service.wait()
        except TimeoutError as error:
            raise SamplingError(
                f"expected one of {len(self._replicas)} model servers to answer and pass the canary within "
                f"{self._outage_timeout_s:g} s, got none ({self._replicas[0].why_lost}); start the run's model there"
            ) from error
        if not self.replicas:
            raise SamplingError(f"all {len(self._replicas)} model servers are given up: {self._replicas[0].why_lost}")

    async def _lose(self, replica: Replica, why: ReplicaLost) -> None:
        """Take a replica out of service. Its open requests fail, and are sent to others or wait."""
        if replica.is_lost:
            return
        replica.why_lost = str(why)
        replica.lost.set()
        logger.error("model server lost left=%d: %s", len(self.replicas), why)
        if not self.replicas:
            self._in_service.clear()
        await replica.disconnect()

    async def _watch(self, replica: Replica) -> None:
        """Take a replica out of service that was restarted, or is unhealthy beside others, and let it rejoin."""
        num_unhealthy = 0
        while not replica.is_given_up:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_interval_s):
                    await replica.lost.wait()
            if replica.is_lost:
                await self._wait_for_return(replica)
                num_unhealthy = 0
                continue
            try:
                num_unhealthy = 0 if await replica.is_healthy(replica.loaded) else num_unhealthy + 1
                if num_unhealthy >= _MAX_UNHEALTHY and len(self._replicas) > 1:
                    raise ReplicaLost(f"the model server at {replica.server.base_url} is not healthy")
            except ReplicaLost as lost:
                await self._lose(replica, lost)

    async def _wait_for_return(self, replica: Replica) -> None:
        """Return when a lost replica has rejoined or is given up; say at once and every half minute what is missing."""
        for num_checks in count():
            before = replica.why_lost
            try:
                async with asyncio.timeout(self._check_interval_s):
                    await replica.server.wait_until_ready()
            except TimeoutError:
                replica.why_lost = f"the model server at {replica.server.base_url} is being started again"
            except SamplingError as given_up:
                replica.why_lost, replica.is_given_up = str(given_up), True
                if all(one.is_given_up for one in self._replicas):
                    self._in_service.set()  # wakes the waiting requests, which then fail
                return
            else:
                try:
                    with boundary(SamplingError, f"the model server at {replica.server.base_url}"):
                        return await self._rejoin(replica)
                except CuaError as error:
                    replica.why_lost = str(error)
            if replica.why_lost != before or num_checks % _CHECKS_PER_LOG_LINE == 0:
                logger.warning("waiting for a model server, left=%d: %s", len(self.replicas), replica.why_lost)
            await asyncio.sleep(self._check_interval_s)

    async def _rejoin(self, replica: Replica) -> None:
        if not await replica.is_healthy(() if replica.loads_adapters else self._needed):
            raise ReplicaLost(f"the model server at {replica.server.base_url} does not answer")
        async with self._publishing:  # so that it misses no adapter
            await replica.server.refresh()
            require_one_version([replica.server, *(other.server for other in self.replicas)])
            if replica.loads_adapters:
                await replica.rejoin(self._needed, self.current, self._canary)
            replica.lost.clear()
            self._in_service.set()
        logger.warning("the model server at %s is back, in_service=%d", replica.server.base_url, len(self.replicas))
