"""Everything of the service that survives its process, in Postgres."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, Row, Select, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from cua_rl.database.models import Training
from cua_rl.database.rows import Scope
from cua_rl.database.tinker_models import TinkerCheckpoint, TinkerKey, TinkerModel, TinkerRequest, TinkerSession
from cua_rl.database.writer import TimedEvent, write_events
from cua_rl.events import Event
from cua_rl.host.request_limits import RequestRefused

NEW_KEY = "tml-"
"""The SDK takes keys that begin so."""


class Store:
    """The tables of the service. Several processes must not use them for the same folder at a time."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def write(
        self,
        *statements: Executable,
        events: Sequence[Event] = (),
        scope: Scope | None = None,
        more: Callable[[Connection, Scope], None] | None = None,
    ) -> Scope:
        """Carry out statements in one transaction, with events of a run for the monitor and more after them;
        returns the run's scope.
        """
        scope = scope or Scope(image_token_id=-1)
        async with self._engine.begin() as connection:
            for statement in statements:
                await connection.execute(statement)
            if events:
                timed = [TimedEvent(event=event, at=datetime.now(UTC)) for event in events]
                before = scope
                scope = await connection.run_sync(lambda synchronous: write_events(synchronous, before, timed))
            if more is not None:
                await connection.run_sync(more, scope)
        return scope

    async def read(self, query: Select[*tuple[Any, ...]]) -> Sequence[Row[*tuple[Any, ...]]]:
        """The rows of a query."""
        async with self._engine.connect() as connection:
            return (await connection.execute(query)).all()

    async def add_key(self, name: str, key: str) -> None:
        """Let in a key under a name, instead of an earlier one with this name."""
        values = {"key_sha256": key_hash(key)}
        statement = insert(TinkerKey).values(name=name, **values)
        await self.write(statement.on_conflict_do_update(index_elements=["name"], set_=values))

    async def keys(self) -> dict[bytes, int]:
        """Ids of all keys by their hashes."""
        return {row.key_sha256: row.id for row in await self.read(select(TinkerKey.key_sha256, TinkerKey.id))}

    async def add_request(self, row: Mapping[str, object]) -> None:
        """Insert a request unless one with its number is there.

        Raises `RequestRefused` if the one that is there is another.
        """
        statement = insert(TinkerRequest).values(**row).on_conflict_do_nothing().returning(TinkerRequest.seq_id)
        model_id, seq_id = row["model_id"], row["seq_id"]
        seen = update(TinkerModel).where(TinkerModel.id == model_id).values(requested_at=func.now())
        async with self._engine.begin() as connection:
            is_new = (await connection.execute(statement)).first() is not None
            await connection.execute(seen)
        if not is_new:
            of_request = TinkerRequest.model_id == model_id, TinkerRequest.seq_id == seq_id
            known = await self.read(select(TinkerRequest.body_sha256).where(*of_request))
            if known[0].body_sha256 != row["body_sha256"]:
                raise RequestRefused(400, f"expected a new seq_id, got {seq_id}, which another request has")

    async def note_snapshot(self, model_id: str, seq_id: int, folder: str) -> None:
        """The state after a request is in a folder: the bodies of requests up to it are not needed any more."""
        of_model = TinkerRequest.model_id == model_id
        await self.write(
            update(TinkerModel).where(TinkerModel.id == model_id).values(snapshot_seq=seq_id, snapshot=folder),
            update(TinkerRequest)
            .where(of_model, TinkerRequest.seq_id <= seq_id, TinkerRequest.body.is_not(None))
            .values(body=None),
        )

    async def find_checkpoint(self, path: str, key_id: int) -> Row[*tuple[Any, ...]]:
        """A checkpoint with `lora_rank` and the `key_id` of its owner; raises `RequestRefused`."""
        rows = await self.read(checkpoints_of(key_id).where(TinkerCheckpoint.path == path))
        if not rows:
            raise RequestRefused(404, f"expected the path of a checkpoint of this key, got {path!r}; list them")
        return rows[0]

    async def clean(self, training_ids: Sequence[int], *, kept: datetime) -> list[str]:
        """Note that runs live, and forget answers from before `kept` and expired checkpoints; returns their folders."""
        is_kept = TinkerRequest.answer.is_not(None)
        await self.write(
            update(Training).where(Training.id.in_(training_ids)).values(heartbeat_at=func.now()),
            update(TinkerRequest).where(TinkerRequest.ended_at < kept, is_kept).values(answer=None),
        )
        return await self.delete_checkpoints(TinkerCheckpoint.expires_at < func.now())

    async def delete_checkpoints(self, which: ColumnElement[bool]) -> list[str]:
        """Forget checkpoints; returns their folders, which no other checkpoint has."""
        async with self._engine.begin() as connection:
            rows = await connection.execute(delete(TinkerCheckpoint).where(which).returning(TinkerCheckpoint.folder))
            return [row.folder for row in rows]


def checkpoints_of(key_id: int) -> Select[*tuple[Any, ...]]:
    """The query for the checkpoints that a key may see, with the model of each: its own, and public ones."""
    query = select(TinkerCheckpoint, TinkerModel.lora_rank, TinkerSession.key_id)
    query = query.join(TinkerModel, TinkerModel.id == TinkerCheckpoint.model_id)
    query = query.join(TinkerSession, TinkerSession.id == TinkerModel.session_id)
    is_alive = TinkerCheckpoint.expires_at.is_(None) | (TinkerCheckpoint.expires_at > func.now())
    return query.where(is_alive, (TinkerSession.key_id == key_id) | TinkerCheckpoint.is_public)


def key_hash(key: str) -> bytes:
    """One round is enough, because keys are long and random."""
    return sha256(key.encode("utf-8", "replace")).digest()


def make_key() -> str:
    """A key that the SDK takes."""
    return NEW_KEY + secrets.token_urlsafe(32)
