"""Models in training: their requests are carried out in order and only once, whatever client and machine do."""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Executable, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.models import Training
from cua_rl.database.rows import Scope
from cua_rl.database.tinker_models import TinkerCheckpoint, TinkerModel, TinkerRequest, TinkerSampler, TinkerSession
from cua_rl.events import (
    CheckpointSaved,
    Event,
    RolloutSource,
    SourceStarted,
    StepTrained,
    TrainingEnded,
    TrainingStarted,
)
from cua_rl.host.request_limits import RequestRefused
from cua_rl.tinker_service.data import Reader
from cua_rl.tinker_service.places import ModelRun, Places, Trained, TrainerHost, Waiting, step_metrics
from cua_rl.tinker_service.requests import Load, Save, Work, read_work
from cua_rl.tinker_service.store import Store
from cua_rl.tinker_service.trained_sequences import write_sequences
from cua_rl.training.config import OptimConfig
from cua_rl.types.errors import ConfigError, DiskFullError, TrainerDeathError, TrainingError

logger = logging.getLogger(__name__)

_MOST_AHEAD = 10_000  # requests of a model that wait for an earlier one
_HELD_BYTES = 2**29  # bodies whose work waits in memory, where it takes up to eight times as much
_CLEAN_S = 15.0
_KEPT_ANSWERS = timedelta(hours=2)
_KEPT_UNUSED = timedelta(hours=1)
"""Weights that were saved for one sampling session are kept as long after the last sample, the newest ones longer."""
_DIED = "the trainer died each time it carried out this request, which is skipped from now on; see the service's log"
_RUN_STATUSES: Mapping[str, Literal["completed", "failed", "cancelled"]] = {
    "success": "completed",
    "errored": "failed",
    "interrupted": "cancelled",
}
_SILENT = timedelta(days=1)
"""A session whose client has not been heard of for this long has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What the end of a request changes in the database, beside itself."""

    answer: bytes
    statements: Sequence[Executable] = ()
    events: Sequence[Event] = ()
    more: Callable[[Connection, Scope], None] | None = None
    unused: Sequence[str] = ()
    """Folders that nobody needs any more after it."""


class Models:
    """All models of the service. `load`, then `run` for as long as requests shall be carried out.

    A model that has a gradient and was not used for `step_s` makes room for another, too. Requests whose bodies exceed
    `held_bytes` together wait in the database, not in memory.
    """

    def __init__(
        self,
        host: TrainerHost,
        store: Store,
        reader: Reader,
        folder: Path,
        *,
        base_model: str,
        max_models: int,
        step_s: float = 60.0,
        held_bytes: int = _HELD_BYTES,
    ) -> None:
        self._store = store
        self._reader = reader
        self._folder = folder
        self._base_model = base_model
        self._places = Places(host, store, reader, folder, max_models, step_s)
        self._runs: dict[str, ModelRun] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._max_held_bytes = held_bytes
        self._held_bytes = 0

    async def load(self) -> None:
        """Take up what an earlier process of the service has left."""
        query = select(TinkerModel, TinkerSession.key_id).join(TinkerSession).where(TinkerSession.ended_at.is_(None))
        for row in await self._store.read(query):
            run = ModelRun(
                id=row.id, key_id=row.key_id, session_id=row.session_id, lora_rank=row.lora_rank, seed=row.seed
            )
            run.num_steps, run.snapshot_seq = row.num_steps, row.snapshot_seq
            run.snapshot = Path(row.snapshot) if row.snapshot else None
            await asyncio.to_thread(self._places.remove_strays, run)
            columns = TinkerRequest.seq_id, TinkerRequest.kind, TinkerRequest.status, TinkerRequest.body_sha256
            requests = await self._store.read(
                select(*columns)
                .where(TinkerRequest.model_id == run.id, TinkerRequest.seq_id > run.snapshot_seq)
                .order_by(TinkerRequest.seq_id)
            )
            ended = [request.seq_id for request in requests if request.status in ("done", "failed")]
            run.next_seq = max(ended, default=run.snapshot_seq) + 1
            for one in requests:
                if one.seq_id >= run.next_seq:
                    is_refused = one.status != "waiting"
                    run.waiting[one.seq_id] = Waiting(kind=one.kind, digest=one.body_sha256, is_refused=is_refused)
            self._runs[run.id] = run

    async def run(self) -> None:
        """Carry out requests until cancelled; raises what the service cannot mend, such as a trainer that dies."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for run in self._runs.values():
                self._begin(run)
            while True:
                await self._clean()
                await asyncio.sleep(_CLEAN_S)

    def _begin(self, run: ModelRun) -> None:
        assert self._tasks is not None, "requests are taken only while run() runs"
        self._runs[run.id] = run
        self._workers[run.id] = self._tasks.create_task(self._work(run), name=f"model-{run.id}")

    def find(self, model_id: str, key_id: int) -> ModelRun:
        """A model of this key; raises `RequestRefused`."""
        run = self._runs.get(model_id)
        if run is None or run.key_id != key_id:
            raise RequestRefused(404, f"expected a model of an open session of this key, got {model_id[:100]!r}")
        return run

    async def add(self, run: ModelRun, user_metadata: object, kind: str, body: bytes) -> str:
        """Create a model by its first request, which has the number 0; one that is repeated changes nothing."""
        if run.id not in self._runs:
            fields = {"id": run.id, "session_id": run.session_id, "lora_rank": run.lora_rank, "seed": run.seed}
            row = insert(TinkerModel).values(**fields, num_steps=0, snapshot_seq=-1, user_metadata=user_metadata)
            await self._store.write(row.on_conflict_do_nothing())
            if run.id not in self._runs:
                self._begin(run)
        return await self.submit(self._runs[run.id], 0, kind, body)

    async def submit(self, run: ModelRun, seq_id: int, kind: str, body: bytes) -> str:
        """Queue a request and return its id; it is not lost from now on. One that is repeated keeps its id.

        Raises `RequestRefused`, and passes its number over, if it asks for what cannot be done.
        """
        if seq_id >= run.next_seq + _MOST_AHEAD:
            raise RequestRefused(400, f"expected seq_id below {run.next_seq + _MOST_AHEAD}, got {seq_id}")
        digest = (await asyncio.to_thread(sha256, body)).digest()
        row = {"model_id": run.id, "seq_id": seq_id, "kind": kind, "body_sha256": digest}

        async def arrive(row: Mapping[str, object], waiting: Waiting) -> None:
            await self._store.add_request(row)
            # one that is stored already may not have come here: its connection may have been lost when it was stored
            if seq_id >= run.next_seq and seq_id not in run.waiting:
                run.waiting[seq_id] = waiting
                self._held_bytes += waiting.num_bytes
                run.arrived.set()

        try:
            work = await self._reader.in_turn(run.key_id, read_work, kind, body, self._reader)
        except RequestRefused as refusal:
            answer = _failure(refusal.message, "user")
            await arrive(
                row | {"status": "refused", "answer": answer}, Waiting(kind=kind, digest=digest, is_refused=True)
            )
            raise
        is_held = self._held_bytes + len(body) <= self._max_held_bytes
        held: dict[str, Any] = {"work": work, "num_bytes": len(body)} if is_held else {}
        await arrive(row | {"status": "waiting", "body": body}, Waiting(kind=kind, digest=digest, **held))
        return f"{run.id}:{seq_id}"

    async def answer(self, run: ModelRun, seq_id: int, wait_s: float) -> tuple[str, str, bytes] | str:
        """Status, kind and answer of a request; its queue state as a text if it has not ended within `wait_s`."""
        request = run.waiting.get(seq_id)
        if request is not None:
            try:
                async with asyncio.timeout(wait_s):
                    await request.ended.wait()
            except TimeoutError:
                return "paused_capacity" if run.is_paused else "active"
        columns = TinkerRequest.status, TinkerRequest.kind, TinkerRequest.answer
        of_request = TinkerRequest.model_id == run.id, TinkerRequest.seq_id == seq_id
        rows = await self._store.read(select(*columns).where(*of_request))
        if not rows or rows[0].answer is None:
            raise RequestRefused(404, f"expected a request of {run.id} whose answer is kept, got seq_id {seq_id}")
        return rows[0].status, rows[0].kind, rows[0].answer

    async def _work(self, run: ModelRun) -> None:
        """Carry out a model's requests by their numbers; missing ones are waited for."""
        while True:
            while run.next_seq not in run.waiting:
                run.arrived.clear()
                await run.arrived.wait()
            request = run.waiting[run.next_seq]
            self._held_bytes, request.num_bytes = self._held_bytes - request.num_bytes, 0
            work = None if request.is_refused else request.work or await self._read_again(run)
            if work is not None:
                await self._carry_out(run, request, work)
            run.next_seq += 1
            del run.waiting[run.next_seq - 1]
            request.ended.set()

    async def _read_again(self, run: ModelRun) -> Work | None:
        """The work of a model's next request; None if other settings allow less than when it arrived."""
        is_next = TinkerRequest.model_id == run.id, TinkerRequest.seq_id == run.next_seq
        (row,) = await self._store.read(select(TinkerRequest.kind, TinkerRequest.body).where(*is_next))
        with suppress(RequestRefused):
            return await asyncio.to_thread(read_work, row.kind, row.body, self._reader)
        return None

    async def _carry_out(self, run: ModelRun, request: Waiting, work: Work) -> None:
        """Carry out a request and record its end; raises `TrainerDeathError` if the trainer is gone for good."""
        status = "refused"  # passed over when requests are repeated, because it never reached the model
        try:
            async with self._places.place(run) as model:
                status = "failed"
                answer = await self._places.apply(run, model, work, request.digest, run.next_seq)
                if isinstance(work, Save):
                    outcome = await self._save(run, model, work)
                else:
                    outcome = self._step(run, answer) if isinstance(work, OptimConfig) else _Outcome(answer=answer)
                await self._end(run, "done", outcome)
                await _delete_folders(outcome.unused)
                run.num_steps += isinstance(work, OptimConfig)
                is_due = isinstance(work, OptimConfig) and time.monotonic() >= run.snapshot_due_at
                if is_due or isinstance(work, Load):
                    await self._save_snapshot(run, model)
        except (TrainingError, ConfigError, DiskFullError, RequestRefused) as error:
            logger.warning("request %s:%d (%s) failed: %s", run.id, run.next_seq, request.kind, error)
            message, category = str(error), "user" if isinstance(error, RequestRefused) else "server"
            if isinstance(error, TrainerDeathError):
                await self._places.recover(run)  # first: if no request helps, none is at fault
                message = _DIED
            await self._end(run, status, _Outcome(answer=_failure(message, category)))

    async def _save_snapshot(self, run: ModelRun, model: Trained) -> None:
        """Save a snapshot after a request, which counts even if this fails."""
        try:
            await self._places.save_snapshot(run, model, run.next_seq)
        except (TrainingError, DiskFullError) as error:
            logger.warning("no snapshot after %s:%d, the next step tries again: %s", run.id, run.next_seq, error)
            if isinstance(error, TrainerDeathError):
                await self._places.recover(run)

    async def _end(self, run: ModelRun, status: str, outcome: _Outcome) -> None:
        """Record the end of a request with all that follows from it, in one transaction."""
        of_request = (TinkerRequest.model_id == run.id) & (TinkerRequest.seq_id == run.next_seq)
        ended = update(TinkerRequest).where(of_request)
        ended = ended.values(status=status, answer=outcome.answer, ended_at=func.now())
        await self._record(run, (ended, *outcome.statements), outcome.events, outcome.more)

    async def _record(
        self,
        run: ModelRun,
        statements: Sequence[Executable],
        events: Sequence[Event],
        more: Callable[[Connection, Scope], None] | None = None,
    ) -> None:
        """Write what happened in a run for the monitor, with statements, in one transaction."""
        if events and run.scope.training_id is None:
            config = {"model_name": self._base_model, "lora_rank": run.lora_rank, "seed": run.seed, "tinker": run.id}
            step = run.num_steps + 1
            started = TrainingStarted(
                run_name=run.name, log_path=str(self._folder), config=config, first_step=step, total_steps=step
            )
            events = [started, *events]
            run.scope = Scope(image_token_id=self._reader.image_token_id)
        run.scope = await self._store.write(*statements, events=events, scope=run.scope, more=more)

    def _step(self, run: ModelRun, answer: bytes) -> _Outcome:
        """An optimizer step as a step of the monitor."""
        step = run.num_steps + 1
        source = RolloutSource(phase="step", step=step)
        digests = b"".join(digest for digest, *_ in run.passes)
        events = (
            SourceStarted(source=source, tasks=(), group_size=0, policy_version=run.num_steps),
            StepTrained(
                step=step,
                policy_version=step,
                datums_sha256=sha256(digests).hexdigest(),
                num_datums=sum(number for _, number, _ in run.passes),
                training_logprobs={},
                metrics=step_metrics([metrics for *_, metrics in run.passes]),
            ),
        )
        datums, run.passes, run.shown = run.shown, [], []
        counted = update(TinkerModel).where(TinkerModel.id == run.id).values(num_steps=step)
        is_run = (Training.run_name == run.name) & (Training.log_path == str(self._folder))
        total = update(Training).where(is_run).values(total_steps=step + 1)  # where it ends, nobody knows

        def show(connection: Connection, scope: Scope) -> None:
            write_sequences(connection, scope, step, datums, self._reader.decode)

        return _Outcome(answer=answer, statements=(counted, total), events=events, more=show)

    async def _save(self, run: ModelRun, model: Trained, work: Save) -> _Outcome:
        """Save a checkpoint, or weights for one sampling session."""
        kind = "sampler_weights" if work.for_sampler else "weights"
        name = f"~{run.next_seq}" if work.sampler_number is not None else work.name or f"{run.next_seq:06d}"
        path = f"tinker://{run.id}/{kind}/{name}"
        # its own folder: that of an earlier checkpoint of this name may be about to be deleted
        folder = self._folder / kind / run.name / (name if name[0] == "~" else f"{name}~{run.next_seq}")
        replaced = await self._store.read(select(TinkerCheckpoint.folder).where(TinkerCheckpoint.path == path))
        if replaced and not work.overwrites:
            raise RequestRefused(400, f"expected a new name, got {path!r}, which exists; choose another")
        if work.for_sampler:
            await model.save_weights_for_sampler(folder)
        else:
            await self._places.save_state(run, model, folder)
        if work.sampler_number is not None:
            return self._save_sampler(run, work, folder)
        expires_at = None if work.ttl_s is None else datetime.now(UTC) + timedelta(seconds=work.ttl_s)
        values = {
            "model_id": run.id,
            "version": run.next_seq,
            "folder": str(folder),
            "size_bytes": await asyncio.to_thread(_folder_bytes, folder),
            "is_public": False,
            "user_metadata": work.user_metadata,
            "expires_at": expires_at,
        }
        row = insert(TinkerCheckpoint).values(path=path, **values)
        row = row.on_conflict_do_update(index_elements=["path"], set_={**values, "created_at": func.now()})
        saved = CheckpointSaved(step=run.num_steps, state_path=str(folder), sampler_path="")
        answer = _json({"path": path, "type": f"save_{kind}" if kind == "weights" else "save_weights_for_sampler"})
        events, unused = () if work.for_sampler else (saved,), [one.folder for one in replaced]
        return _Outcome(answer=answer, statements=(row,), events=events, unused=unused)

    def _save_sampler(self, run: ModelRun, work: Save, folder: Path) -> _Outcome:
        sampler_id = f"{run.session_id}:sample:{work.sampler_number}"
        weights = {"model_id": run.id, "version": run.next_seq, "folder": str(folder)}
        values = {"session_id": run.session_id, "is_inflight": work.is_inflight, **weights}
        row = insert(TinkerSampler).values(id=sampler_id, **values)
        statements: list[Executable] = [row.on_conflict_do_update(index_elements=["id"], set_=values)]
        if work.is_inflight:
            moves_on = (TinkerSampler.model_id == run.id) & TinkerSampler.is_inflight
            statements.append(update(TinkerSampler).where(moves_on).values(**weights))
        answer = _json({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})
        return _Outcome(answer=answer, statements=statements)

    async def end_session(self, session_id: str, reason: str) -> None:
        """Let the models of a session leave the trainer; their checkpoints stay, other weights do not."""
        of_session = TinkerSampler.session_id == session_id
        await self._store.write(
            update(TinkerSession).where(TinkerSession.id == session_id).values(ended_at=func.now()),
            delete(TinkerSampler).where(
                of_session, TinkerSampler.model_path.is_(None), TinkerSampler.model_id.is_not(None)
            ),
        )
        status = _RUN_STATUSES[reason]
        for run in [run for run in self._runs.values() if run.session_id == session_id]:
            del self._runs[run.id]
            worker = self._workers.pop(run.id)
            worker.cancel()
            await asyncio.wait([worker])
            self._held_bytes -= sum(request.num_bytes for request in run.waiting.values())
            await self._places.leave(run)
            run.snapshot = None
            await asyncio.to_thread(self._places.remove_strays, run)
            for folder in (self._folder / "sampler_weights" / run.name).glob("~*"):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            forget = update(TinkerRequest).where(TinkerRequest.model_id == run.id).values(body=None)
            await self._record(run, (forget,), (TrainingEnded(status=status),) if run.num_steps else ())

    async def _clean(self) -> None:
        """Say that runs live, end sessions that have gone silent, and delete what nobody needs any more."""
        now = datetime.now(UTC)
        ids = [run.scope.training_id for run in self._runs.values() if run.scope.training_id is not None]
        folders = await self._store.clean(ids, kept=now - _KEPT_ANSWERS)
        is_own = TinkerSampler.model_path.is_(None) & (TinkerSampler.used_at < now - _KEPT_UNUSED)
        newest = select(TinkerSampler.model_id, func.max(TinkerSampler.version).label("version"))
        newest = newest.group_by(TinkerSampler.model_id).subquery()
        old = select(TinkerSampler.id).join(newest, newest.c.model_id == TinkerSampler.model_id)
        rows = await self._store.read(old.where(is_own, TinkerSampler.version < newest.c.version))
        await self._store.write(delete(TinkerSampler).where(TinkerSampler.id.in_([row.id for row in rows])))
        rows = await self._store.read(select(TinkerSampler.folder).where(TinkerSampler.folder.is_not(None)))
        used = {Path(row.folder).parts[-2:] for row in rows}
        before = (now - _KEPT_UNUSED).timestamp()
        await _delete_folders([*folders, *await asyncio.to_thread(self._unused_weights, used, before)])
        is_silent = (TinkerSession.seen_at < now - _SILENT) & TinkerSession.ended_at.is_(None)
        for row in await self._store.read(select(TinkerSession.id).where(is_silent)):
            await self.end_session(row.id, "interrupted")

    def _unused_weights(self, used: set[tuple[str, ...]], before: float) -> list[Path]:
        """Weights from before a time that were saved for sampling sessions, of which none samples from them now."""
        unused: list[Path] = []
        for folder in (self._folder / "sampler_weights").glob("*/~*"):
            with suppress(FileNotFoundError):  # its session may be ending
                if folder.parts[-2:] not in used and folder.stat().st_mtime < before:
                    unused.append(folder)
        return unused


async def _delete_folders(folders: Sequence[str | Path]) -> None:
    for folder in folders:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _json(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode()


def _failure(message: str, category: str) -> bytes:
    return _json({"error": message, "category": category})


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
