"""Places in the trainer: which models are in it, how a model returns to it, and how requests are carried out there.

A model is its snapshot and the requests after it. So it leaves the trainer when others need its place, and comes back,
in the same way as it continues after the service was killed: a new adapter, the snapshot, the requests once more.
"""

import asyncio
import json
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Row, select

from cua_rl.database.rows import Scope
from cua_rl.database.tinker_models import TinkerRequest
from cua_rl.metrics import SUMMED
from cua_rl.tinker_service.data import Pass, Reader
from cua_rl.tinker_service.messages import encode_pass
from cua_rl.tinker_service.requests import Create, Load, Save, Work, read_work
from cua_rl.tinker_service.store import Store
from cua_rl.tinker_service.trained_sequences import MOST_SHOWN
from cua_rl.training.config import LossConfig, OptimConfig
from cua_rl.training.folders import link_folder
from cua_rl.training.wire import ForwardBackwardOutput, OptimStepOutput
from cua_rl.types.errors import ConfigError, TrainingError, boundary
from cua_rl.types.rollout import AdapterRef, Datum

logger = logging.getLogger(__name__)

_WORK_PER_SNAPSHOT = 20.0  # a snapshot may take a twentieth of the time
_LOOK_S = 5.0
_LOADED = "load-"
"""Folders of a model with what the request of this number has loaded."""


class Trained(Protocol):
    """One model in the trainer; `training.client.TrainingClient` says what the methods do."""

    async def forward_backward(
        self,
        datums: Sequence[Datum],
        loss: LossConfig,
        *,
        token_weights: Sequence[float] | None = None,
        ratio_masks: Sequence[tuple[bool, ...]] | None = None,
        with_gradient: bool = True,
    ) -> ForwardBackwardOutput: ...

    async def optim_step(self, optim: OptimConfig) -> OptimStepOutput: ...

    async def save_state(self, path: Path) -> None: ...

    async def load_state(self, path: Path, *, with_optimizer: bool = True) -> None: ...

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef: ...


class TrainerHost(Protocol):
    """The trainer, which holds several models."""

    async def create_model(self, name: str, *, rank: int, seed: int) -> Trained:
        """Add a model with fresh weights."""
        ...

    async def drop_model(self, name: str) -> None: ...

    async def revive(self) -> None:
        """Start a trainer that has died again, as it was; raises `TrainerDeathError` if that fails."""
        ...


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A request that has arrived and was not carried out yet."""

    kind: str
    digest: bytes
    is_refused: bool = False
    """Whether its number is passed over."""
    work: Work | None = None
    """None for one that is read again when its turn comes."""
    num_bytes: int = 0
    """Of the body, if the work is here."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True)
class ModelRun:
    """A model and what waits for it."""

    id: str
    key_id: int
    session_id: str
    lora_rank: int
    seed: int
    num_steps: int = 0
    snapshot_seq: int = -1
    snapshot: Path | None = None
    loaded: Path | None = None
    """What the trainer has loaded; until it has taken a step and saved it, it may have to load this again."""
    has_stepped: bool = False
    """Whether it has taken a step since then."""
    next_seq: int = 0
    waiting: dict[int, Waiting] = field(default_factory=dict[int, Waiting])
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    is_paused: bool = False
    """Whether it waits for a place in the trainer."""
    has_gradient: bool = False
    passes: list[tuple[bytes, int, Mapping[str, float]]] = field(
        default_factory=list[tuple[bytes, int, Mapping[str, float]]]
    )
    """Digest, number of data and metrics of the passes since the last optimizer step."""
    shown: list[Datum] = field(default_factory=list[Datum])
    """Of the data of these passes, what the monitor shows."""
    used_at: float = 0.0
    snapshot_due_at: float = 0.0
    scope: Scope = field(default_factory=lambda: Scope(image_token_id=-1))

    @property
    def name(self) -> str:
        """Of its folders and in the trainer."""
        return self.id.replace(":", ".")


class Places:
    """The models in the trainer; the least recently used one leaves it for another."""

    def __init__(
        self, host: TrainerHost, store: Store, reader: Reader, folder: Path, max_models: int, step_s: float
    ) -> None:
        self._host = host
        self._store = store
        self._reader = reader
        self._snapshots = folder / "snapshots"
        self._max_models = max_models
        self._step_s = step_s
        self._taken: OrderedDict[str, tuple[ModelRun, Trained]] = OrderedDict()
        """Least recently used first."""
        self._in_use: set[str] = set()
        self._change = asyncio.Condition()

    @asynccontextmanager
    async def place(self, run: ModelRun) -> AsyncGenerator[Trained]:
        """The model in the trainer while the block runs, as its requests so far have made it.

        Raises `TrainingError` if one fails that did not.
        """
        async with self._change:
            try:
                while run.id not in self._taken:
                    await self._take(run)
            finally:
                run.is_paused = False
            self._taken.move_to_end(run.id)
            self._in_use.add(run.id)
        try:
            yield self._taken[run.id][1]
        finally:
            run.used_at = time.monotonic()
            async with self._change:
                self._in_use.discard(run.id)
                self._change.notify_all()

    async def _take(self, run: ModelRun) -> None:
        """Take a place if there is one, else wait for a change."""
        if await self._make_room():
            try:
                self._taken[run.id] = run, await self._restore(run)
            except ConfigError:
                if not self._taken:
                    raise
                self._max_models = len(self._taken)  # memory does not hold more
            return
        run.is_paused = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._change.wait()

    async def _make_room(self) -> bool:
        """Whether there is a place for one more model, now that another has left if need be and possible."""
        if len(self._taken) < self._max_models:
            return True
        now = time.monotonic()
        for run, model in list(self._taken.values()):
            if run.id in self._in_use or (run.has_gradient and now - run.used_at < self._step_s):
                continue
            if not run.has_gradient and run.snapshot_seq < run.next_seq - 1:
                await self.save_snapshot(run, model, run.next_seq - 1)
            await self._drop(run)
            return True
        return False

    async def leave(self, run: ModelRun) -> None:
        """Take a model, whose requests have ended, out of the trainer."""
        async with self._change:
            if run.id in self._taken:
                await self._drop(run)
                self._change.notify_all()

    async def recover(self, run: ModelRun) -> None:
        """Let a model at whose request the trainer has died come back as it is on record.

        Raises `TrainerDeathError` if the trainer is gone for good.
        """
        await self._host.revive()
        await self.leave(run)

    async def _drop(self, run: ModelRun) -> None:
        del self._taken[run.id]
        await self._host.drop_model(run.name)
        run.loaded = None

    async def _restore(self, run: ModelRun) -> Trained:
        model = await self._host.create_model(run.name, rank=run.lora_rank, seed=run.seed)
        try:
            run.has_stepped, run.has_gradient, run.passes, run.shown = False, False, [], []
            if run.snapshot is not None:
                await model.load_state(run.snapshot)
                run.loaded = run.snapshot
            query = select(TinkerRequest).where(
                TinkerRequest.model_id == run.id,
                TinkerRequest.seq_id.between(run.snapshot_seq + 1, run.next_seq - 1),
                TinkerRequest.status.in_(("done", "failed")),
            )
            for row in await self._effective(await self._store.read(query.order_by(TinkerRequest.seq_id))):
                work = await asyncio.to_thread(read_work, row.kind, row.body, self._reader)
                if not (isinstance(work, Save | Create) or (isinstance(work, Pass) and work.is_forward_only)):
                    await self.apply(run, model, work, row.body_sha256, row.seq_id)
        except BaseException:
            await self._host.drop_model(run.name)
            raise
        return model

    async def _effective(self, rows: Sequence[Row[*tuple[Any, ...]]]) -> list[Row[*tuple[Any, ...]]]:
        """The requests but those that failed, of which the trainer may have died, and the passes that these dropped."""
        kept: list[Row[*tuple[Any, ...]]] = []
        step: list[Row[*tuple[Any, ...]]] = []
        for row in rows:
            if row.status == "failed":
                work = await asyncio.to_thread(read_work, row.kind, row.body, self._reader)
                if isinstance(work, OptimConfig) or (isinstance(work, Pass) and not work.is_forward_only):
                    step = []
                continue
            step.append(row)
            if row.kind in ("optim_step", "load_weights"):
                kept, step = [*kept, *step], []
        return kept + step

    async def apply(self, run: ModelRun, model: Trained, work: Work, digest: bytes, seq_id: int) -> bytes:
        """Let a request take effect on the model in the trainer; returns its answer, empty if it only saves."""
        match work:
            case Pass():
                passes, shown = (run.passes, run.shown) if run.has_gradient else ([], [])
                if not work.is_forward_only:
                    run.has_gradient, run.passes, run.shown = False, [], []  # a failure drops what there is
                output = await model.forward_backward(
                    work.datums,
                    work.loss,
                    token_weights=(1.0,) * len(work.datums),
                    ratio_masks=work.ratio_masks,
                    with_gradient=not work.is_forward_only,
                )
                if not work.is_forward_only:
                    run.has_gradient, run.passes = True, [*passes, (digest, len(work.datums), output.metrics)]
                    run.shown = [*shown, *work.datums][:MOST_SHOWN]
                return encode_pass([row[1:] for row in output.training_logprobs], sdk_metrics(output.metrics))
            case OptimConfig():
                run.has_gradient = False
                taken = await model.optim_step(work)
                run.has_stepped = True
                run.passes.append(
                    (b"", 0, {"optim/grad_norm": taken.grad_norm, "optim/learning_rate": work.learning_rate})
                )
                return json.dumps({"metrics": {"grad_norm:mean": taken.grad_norm}}).encode()
            case Load():
                folder = self._snapshots / run.name / f"{_LOADED}{seq_id}"  # the checkpoint may be deleted
                if not folder.is_dir():
                    checkpoint = await self._store.find_checkpoint(work.path, run.key_id)
                    with boundary(TrainingError, f"loading {work.path}"):  # it may be deleted while it is read
                        await asyncio.to_thread(link_folder, Path(checkpoint.folder), folder)
                await model.load_state(folder, with_optimizer=work.with_optimizer)
                run.loaded, run.has_stepped, run.has_gradient = folder, False, False
                return json.dumps({"path": work.path, "model_id": run.id, "type": "load_weights"}).encode()
            case Create():
                return json.dumps({"model_id": run.id, "type": "create_model"}).encode()
            case Save():
                return b""

    async def save_state(self, run: ModelRun, model: Trained, folder: Path) -> None:
        """Save a checkpoint; without a gradient it is also a snapshot, which stays when the checkpoint is deleted."""
        if run.has_gradient:
            await model.save_state(folder)
            return
        if run.snapshot is None or run.snapshot_seq < run.next_seq - 1:
            await self.save_snapshot(run, model, run.next_seq - 1)
        assert run.snapshot is not None
        with boundary(TrainingError, f"saving {folder}"):
            await asyncio.to_thread(link_folder, run.snapshot, folder)

    async def save_snapshot(self, run: ModelRun, model: Trained, seq_id: int) -> None:
        """Save a model without gradient as the request `seq_id` has left it, and forget the requests up to it."""
        started, folder = time.monotonic(), self._snapshots / run.name / str(seq_id)
        await model.save_state(folder)
        await self._store.note_snapshot(run.id, seq_id, str(folder))
        run.snapshot_seq, run.snapshot = seq_id, folder
        run.loaded = None if run.has_stepped else run.loaded
        run.snapshot_due_at = time.monotonic() + _WORK_PER_SNAPSHOT * (time.monotonic() - started)
        await asyncio.to_thread(self.remove_strays, run)

    def remove_strays(self, run: ModelRun) -> None:
        """Delete snapshots of a model that neither it nor the trainer needs any more."""
        for folder in (self._snapshots / run.name).glob("*"):
            is_repeated = folder.name.startswith(_LOADED) and int(folder.name.removeprefix(_LOADED)) > run.snapshot_seq
            if folder not in (run.snapshot, run.loaded) and not is_repeated:
                shutil.rmtree(folder, ignore_errors=True)


def sdk_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics under names as the SDK wants them, with one colon before the way to combine those of several chunks."""
    named = {"loss:sum": metrics["loss/total"]}
    for name, value in metrics.items():
        last = name.rpartition("/")[2].rpartition("_")[2]
        how = last if last in ("max", "min") else "sum" if name in SUMMED else "mean"
        if name != "loss/total":
            named[f"{name.replace('/', '_')}:{how}"] = value
    return named


def step_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of an optimizer step from those of its passes: sums of losses and counts, means of the rest."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {
        name: sum(some) if name == "loss/total" or name in SUMMED else sum(some) / len(some)
        for name, some in values.items()
    }
