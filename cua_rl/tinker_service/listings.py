"""Lists the sessions, training runs and checkpoints of a key, and changes checkpoints."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Row, Select, func, select, update

from cua_rl.database.tinker_models import TinkerCheckpoint, TinkerModel, TinkerSampler, TinkerSession
from cua_rl.host.request_limits import RequestRefused
from cua_rl.tinker_service.messages import Call, Fields
from cua_rl.tinker_service.requests import CHECKPOINT_PATH, read_ttl
from cua_rl.tinker_service.store import Store, checkpoints_of

_MOST_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Listings:
    """The endpoints of the SDK's `RestClient`."""

    store: Store
    base_model: str

    async def sessions(self, call: Call) -> Mapping[str, object]:
        query = select(TinkerSession.id).where(TinkerSession.key_id == call.key_id)
        rows, _ = await self._page(call, query, TinkerSession.created_at)
        return {"sessions": [row.id for row in rows]}

    async def session(self, call: Call) -> Mapping[str, object]:
        is_it = TinkerSession.id == call.path("session_id"), TinkerSession.key_id == call.key_id
        rows = await self.store.read(select(TinkerSession.id, TinkerSession.user_metadata).where(*is_it))
        if not rows:
            raise RequestRefused(404, f"expected a session of this key, got {call.path('session_id')[:100]!r}")
        models = await self.store.read(select(TinkerModel.id).where(TinkerModel.session_id == rows[0].id))
        samplers = await self.store.read(select(TinkerSampler.id).where(TinkerSampler.session_id == rows[0].id))
        ids = {"training_run_ids": [row.id for row in models], "sampler_ids": [row.id for row in samplers]}
        return {**ids, "user_metadata": rows[0].user_metadata}

    async def training_runs(self, call: Call) -> Mapping[str, object]:
        rows, cursor = await self._page(call, self._models(call), TinkerModel.created_at)
        return {"training_runs": [await self._run(row) for row in rows], "cursor": cursor}

    async def training_run(self, call: Call) -> Mapping[str, object]:
        return await self._run(await self._model(call))

    async def checkpoints(self, call: Call) -> Mapping[str, object]:
        """All checkpoints of the key, or those of one model."""
        query = checkpoints_of(call.key_id).where(TinkerSession.key_id == call.key_id)
        if "model_id" in call.request.path_params:
            query = query.where(TinkerCheckpoint.model_id == (await self._model(call)).id)
        rows, cursor = await self._page(call, query, TinkerCheckpoint.created_at)
        return {"checkpoints": [_shown(row) for row in rows], "cursor": cursor}

    async def weights_info(self, call: Call) -> Mapping[str, object]:
        found = await self.store.find_checkpoint(
            call.fields().text("tinker_path", pattern=CHECKPOINT_PATH), call.key_id
        )
        trained = {"train_unembed": False, "train_mlp": True, "train_attn": True}
        return {"base_model": self.base_model, "is_lora": True, "lora_rank": found.lora_rank, **trained}

    async def delete_checkpoint(self, call: Call) -> Mapping[str, object]:
        path = (await self._own(call)).path
        for folder in await self.store.delete_checkpoints(TinkerCheckpoint.path == path):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return {}

    async def publish(self, call: Call) -> Mapping[str, object]:
        """Let every key of the service load a checkpoint."""
        return await self._change(call, is_public=True)

    async def unpublish(self, call: Call) -> Mapping[str, object]:
        return await self._change(call, is_public=False)

    async def set_ttl(self, call: Call) -> Mapping[str, object]:
        ttl_s = read_ttl(call.fields())
        return await self._change(call, expires_at=ttl_s and datetime.now(UTC) + timedelta(seconds=ttl_s))

    async def _change(self, call: Call, **values: object) -> Mapping[str, object]:
        path = (await self._own(call)).path
        await self.store.write(update(TinkerCheckpoint).where(TinkerCheckpoint.path == path).values(**values))
        return {}

    async def _own(self, call: Call) -> Row[*tuple[Any, ...]]:
        path = f"tinker://{call.path('model_id')}/{call.path('kind')}/{call.path('name')}"
        found = await self.store.find_checkpoint(path, call.key_id)
        if found.key_id != call.key_id:
            raise RequestRefused(403, f"expected a checkpoint of this key to change, got {path!r} of another")
        return found

    def _models(self, call: Call) -> Select[*tuple[Any, ...]]:
        query = select(TinkerModel).join(TinkerSession, TinkerSession.id == TinkerModel.session_id)
        return query.where(TinkerSession.key_id == call.key_id)

    async def _model(self, call: Call) -> Row[*tuple[Any, ...]]:
        rows = await self.store.read(self._models(call).where(TinkerModel.id == call.path("model_id")))
        if not rows:
            raise RequestRefused(404, f"expected a training run of this key, got {call.path('model_id')[:100]!r}")
        return rows[0]

    async def _run(self, row: Row[*tuple[Any, ...]]) -> Mapping[str, object]:
        is_its = TinkerCheckpoint.model_id == row.id
        query = select(TinkerCheckpoint).where(is_its).order_by(TinkerCheckpoint.created_at.desc())
        kinds = {"weights": "last_checkpoint", "sampler_weights": "last_sampler_checkpoint"}
        last: dict[str, object] = {}
        for checkpoint in await self.store.read(query):
            last.setdefault(kinds[checkpoint.path.split("/")[3]], _shown(checkpoint))
        return {
            "training_run_id": row.id,
            "base_model": self.base_model,
            "model_owner": "owner of the key",
            "is_lora": True,
            "lora_rank": row.lora_rank,
            "last_request_time": row.requested_at.isoformat(),
            "user_metadata": row.user_metadata,
            **last,
        }

    async def _page(
        self, call: Call, query: Select[*tuple[Any, ...]], order: Any
    ) -> tuple[Sequence[Row[*tuple[Any, ...]]], Mapping[str, int]]:
        """A page of rows, newest first, and the cursor that describes it."""
        given = call.request.query_params
        texts = {name: given[name] for name in ("limit", "offset") if name in given}
        numbers = Fields(
            {name: int(text) if text.isdecimal() and len(text) < 10 else text for name, text in texts.items()}
        )
        limit, offset = numbers.whole("limit", 1, _MOST_LISTED, 100), numbers.whole("offset", 0, 10**9, 0)
        total = (await self.store.read(select(func.count()).select_from(query.subquery())))[0][0]
        rows = await self.store.read(query.order_by(order.desc()).limit(limit).offset(offset))
        return rows, {"offset": offset, "limit": limit, "total_count": total}


def _shown(row: Row[*tuple[Any, ...]]) -> Mapping[str, object]:
    """A checkpoint as the SDK reads it."""
    _, _, _, kind, name = row.path.split("/")
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": "training" if kind == "weights" else "sampler",
        "time": row.created_at.isoformat(),
        "tinker_path": row.path,
        "size_bytes": row.size_bytes,
        "public": row.is_public,
        "user_metadata": row.user_metadata,
        "expires_at": row.expires_at and row.expires_at.isoformat(),
    }
