"""Sends a run to a remote monitor while it is in progress: in batches from an on-disk queue, with retries. Training
never waits for it and never fails because of it.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from cua_rl.events import Event, Recorder
from cua_rl.monitor.sent_items import TRAINING, ItemMaker, Reference, SentItem
from cua_rl.monitor.spool import Spool
from cua_rl.types.errors import CuaError, DiskFullError, boundary, writing
from cua_rl.types.json_values import is_object

logger = logging.getLogger(__name__)

_QUEUE_SIZE = 4096
_BATCH_LINES, _BATCH_BYTES = 256, 8 * 2**20
_MAX_SPOOL_BYTES = 4 * 2**30
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 15.0
_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 20.0
_HOPELESS = (400, 413, 415, 422)
_REFERRED = ("tasks", "environments", "steps", "baselines", "evals", "rollouts")  # kinds whose ids later items name


class SendError(CuaError):
    """A batch did not arrive; it is retried."""


class _Refused(CuaError):
    """A batch that the monitor rejects; a retry would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorAddress:
    """Address and credentials of a remote monitor."""

    base_url: str
    token: str
    project_id: str | None = None

    def __repr__(self) -> str:
        return f"MonitorAddress(base_url={self.base_url!r}, token='***')"

    @property
    def ingest_url(self) -> str:
        return f"{self.base_url.rstrip('/')}/api/ingest/batch"

    def run_url(self, training_id: int) -> str:
        query = f"?project_id={self.project_id}" if self.project_id else ""
        return f"{self.base_url.rstrip('/')}/{training_id}{query}"


class SendingRecorder:
    """A `Recorder` that passes events to another one and sends them to a monitor; an async context manager.

    Unsent data stays in `folder` and is sent when the run resumes there.
    """

    def __init__(
        self,
        inner: Recorder,
        address: MonitorAddress,
        folder: Path,
        *,
        image_token_id: int,
        max_spool_bytes: int = _MAX_SPOOL_BYTES,
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
    ) -> None:
        self._inner = inner
        self._address = address
        self._folder = folder
        self._maker = ItemMaker(image_token_id=image_token_id)
        self._max_spool_bytes = max_spool_bytes
        self._close_timeout_s = close_timeout_s
        self._queue: asyncio.Queue[tuple[Event, datetime]] = asyncio.Queue(_QUEUE_SIZE)
        self._has_more = asyncio.Event()
        self._is_drained = asyncio.Event()
        self._ids: dict[Reference, int] = {}
        self._is_failed = False

    @property
    def num_waiting_bytes(self) -> int:
        return self._spool.num_bytes

    async def record(self, event: Event) -> None:
        """Pass the event on, and queue it for the monitor."""
        await self._inner.record(event)
        if not self._is_failed:
            await self._queue.put((event, datetime.now(UTC)))

    async def flush(self) -> None:
        """Flush the other recorder; does not wait for the monitor."""
        await self._inner.flush()

    async def wait_until_sent(self) -> None:
        """Wait until everything recorded so far has arrived."""
        await self._queue.join()
        await self._is_drained.wait()

    async def __aenter__(self) -> Self:
        self._spool = await asyncio.to_thread(Spool, self._folder, max_bytes=self._max_spool_bytes)
        await asyncio.to_thread(self._load_ids)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._address.token}"},
            timeout=_TIMEOUT_S,
            trust_env=False,
            verify=httpx.create_ssl_context(),
        )
        self._tasks = (
            asyncio.create_task(self._guarded(self._spool_forever()), name="monitor-spool"),
            asyncio.create_task(self._guarded(self._send_forever()), name="monitor-send"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await self.wait_until_sent()
        except TimeoutError:
            logger.warning(
                "%.1f MB for the monitor wait in %s: they are sent when the run is resumed there",
                self._spool.num_bytes / 1e6,
                self._folder,
            )
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            await self._client.aclose()

    async def _guarded(self, work: Any) -> None:
        """Run a background task; its failure ends the sending, never the training."""
        try:
            with boundary(SendError, "sending to the monitor"), writing(self._folder):
                await work
        except (SendError, DiskFullError) as error:
            self._is_failed = True
            self._is_drained.set()
            logger.error("the run is not sent to the monitor any more: %s", error, exc_info=error)
            while not self._queue.empty():
                self._queue.get_nowait()
                self._queue.task_done()

    async def _spool_forever(self) -> None:
        while True:
            events = [await self._queue.get()]
            while len(events) < 64 and not self._queue.empty():
                events.append(self._queue.get_nowait())
            try:
                await asyncio.to_thread(self._append, events)
            finally:
                self._is_drained.clear()
                self._has_more.set()
                for _ in events:
                    self._queue.task_done()

    def _append(self, events: Sequence[tuple[Event, datetime]]) -> None:
        refused = self._spool.num_refused
        self._spool.append(item.to_line() for event, at in events for item in self._maker.make(event, at))
        if self._spool.num_refused > refused == 0:
            logger.error(
                "the queue for the monitor is full (%.0f MB in %s): newer items are left out, the run's own database "
                "has them all",
                self._spool.num_bytes / 1e6,
                self._folder,
            )

    async def _send_forever(self) -> None:
        retry_s, is_away = _FIRST_RETRY_S, False
        while True:
            self._has_more.clear()
            waiting = await asyncio.to_thread(self._spool.peek, max_lines=_BATCH_LINES, max_bytes=_BATCH_BYTES)
            if waiting is None:
                if not self._has_more.is_set():  # nothing was queued while we looked
                    self._is_drained.set()
                await self._has_more.wait()
                continue
            lines, offset = waiting
            try:
                await self._send(lines)
            except SendError as error:
                if not is_away:
                    logger.warning("monitor away url=%s, trying again: %s", self._address.base_url, error)
                is_away = True
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                continue
            if is_away:
                logger.warning("monitor back url=%s, nothing lost", self._address.base_url)
            retry_s, is_away = _FIRST_RETRY_S, False
            await asyncio.to_thread(self._spool.acknowledge, offset)

    async def _send(self, lines: Sequence[bytes]) -> None:
        """Send items in as few requests as their references allow; raises `SendError` if one does not arrive."""
        items = [SentItem.from_line(line) for line in lines]
        while items:
            wave, items = self._next_wave(items)
            if not wave:
                waiting_items = [item for item in items if item.waits_for_rollouts]
                stuck = [item for item in items if not item.waits_for_rollouts]
                self._refuse(stuck or items, "refers to an item that was not stored")
                items = waiting_items if stuck else []
                continue
            await self._post(wave)

    def _next_wave(self, items: Sequence[SentItem]) -> tuple[list[SentItem], list[SentItem]]:
        """Items whose references are known, and the rest; updates of the same item keep their order."""
        wave: list[SentItem] = []
        rest: list[SentItem] = []
        held: set[Reference] = set()
        for item in items:
            name = (item.kind, item.client_id)
            is_ready = all(reference in self._ids and reference not in held for reference in item.references.values())
            has_training = any(one.kind == "training" for one in wave)
            if item.waits_for_rollouts:
                is_ready &= "rollouts" not in {kind for kind, _ in held} | {one.kind for one in wave}
            if not is_ready or name in held or (item.kind == "training" and wave) or has_training:
                rest.append(item)
                held.add(name)
            else:
                wave.append(item)
        return wave, rest

    async def _post(self, wave: Sequence[SentItem]) -> None:
        body: dict[str, Any] = {}
        for item in wave:
            references = {name: self._ids[reference] for name, reference in item.references.items()}
            payload = {**item.payload, **references}
            if item.kind == "training":
                body["training"] = payload
            else:
                body.setdefault(item.kind, []).append({"client_id": item.client_id, **payload})
        content = await asyncio.to_thread(lambda: json.dumps(body).encode())
        try:
            answer = await self._request(content)
        except _Refused as error:
            self._refuse(wave, str(error))
            return
        new = {
            (kind, str(stored["client_id"])): int(stored["id"]) for kind in _REFERRED for stored in answer.get(kind, [])
        }
        if answer.get("training_id") is not None:
            new[TRAINING] = int(answer["training_id"])
        if TRAINING in new and TRAINING not in self._ids:
            logger.info("run is shown at %s", self._address.run_url(new[TRAINING]))
        if any(self._ids.get(name) != number for name, number in new.items()):
            self._ids |= new
            await asyncio.to_thread(self._save_ids, new)
        for error in answer.get("errors", []):
            logger.warning("the monitor refused one of %s, %s: %s", error["kind"], error["client_id"], error["error"])

    async def _request(self, content: bytes) -> Mapping[str, Any]:
        try:
            answer = await self._client.post(
                self._address.ingest_url, content=content, headers={"Content-Type": "application/json"}
            )
        except httpx.HTTPError as error:
            raise SendError(f"{type(error).__name__}: {error}") from error
        try:
            parsed: object = answer.json()
        except ValueError:
            parsed = None
        if answer.status_code in _HOPELESS and not (is_object(parsed) and "errors" in parsed):
            raise _Refused(f"was refused with status {answer.status_code}: {answer.text[:200]}")
        if answer.status_code not in (200, 422) or not is_object(parsed) or "errors" not in parsed:
            raise SendError(f"expected the monitor to store a batch, got {answer.status_code}: {answer.text[:200]}")
        return parsed

    def _refuse(self, items: Sequence[SentItem], reason: str) -> None:
        for item in items[:3]:
            logger.warning("cannot send one of %s, %s: it %s", item.kind, item.client_id, reason)

    def _load_ids(self) -> None:
        path = self._folder / "ids.jsonl"
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.endswith("]"):
                    kind, client_id, number = json.loads(line)
                    self._ids[kind, client_id] = number

    def _save_ids(self, new: Mapping[Reference, int]) -> None:
        with (self._folder / "ids.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps([*name, number]) + "\n" for name, number in new.items())
