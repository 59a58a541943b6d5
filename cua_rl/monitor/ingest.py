"""Stores what projects send. Blocking; one transaction per batch, a savepoint per item, so that one bad item is one
error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

from pydantic import ValidationError
from sqlalchemy import Engine, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError, StatementError

from cua_rl.database.monitor_models import IngestItem
from cua_rl.errors import CuaError
from cua_rl.monitor import ingest_rows
from cua_rl.monitor.ingest_images import store_images
from cua_rl.monitor.ingest_schemas import ITEM_CLASSES, IngestAnswer, IngestBatch, ItemError, Mapped, Sent, SentTraining
from cua_rl.monitor.ingest_scope import IngestScope, ItemRefused
from cua_rl.monitor.projects import find_project

_MAX_DEPTH = 64


class UnknownToken(CuaError):
    """The token belongs to no project."""


@dataclass(slots=True)
class _Batch:
    scope: IngestScope
    answer: IngestAnswer
    num_items: int = 0


def ingest(engine: Engine, token: str, sent: IngestBatch) -> IngestAnswer:
    """Store a batch; what could not be stored is in `errors`.

    Raises:
        UnknownToken: no project has this token.
    """
    with engine.begin() as connection:
        project = find_project(connection, token)
        if project is None:
            raise UnknownToken("expected the token of a project, got another one")
        scope = IngestScope(connection=connection, project_id=project[0], project_name=project[1])
        batch = _Batch(scope, IngestAnswer())
        if sent.training is not None:
            _store_training(batch, sent.training)
        for kind, item_class in ITEM_CLASSES.items():
            items = cast("list[dict[str, Any]]", getattr(sent, kind))
            for index, payload in enumerate(items):
                _store_item(batch, kind, item_class, index, payload)
        return batch.answer


def _store_training(batch: _Batch, payload: dict[str, Any]) -> None:
    scope = batch.scope
    with _Guarded(batch, "training", 0, payload) as guarded:
        item = guarded.parse(SentTraining)
        batch.answer.training_id = ingest_rows.store_training(scope, item, guarded.payload)


def _store_item(batch: _Batch, kind: str, item_class: type[Sent], index: int, payload: dict[str, Any]) -> None:
    scope = batch.scope
    with _Guarded(batch, kind, index, payload) as guarded:
        item = guarded.parse(item_class)
        client_id = item.client_id or _content_id(payload)
        found = _upsert(scope, kind, client_id, guarded.payload)
        row_id = ingest_rows.store(scope, kind, item, item_id=found.item_id, row_id=found.row_id)
        if row_id != found.row_id:
            statement = update(IngestItem).where(IngestItem.id == found.item_id).values(row_id=row_id)
            scope.connection.execute(statement)
        mapped = cast("list[Mapped]", getattr(batch.answer, kind))
        mapped.append(Mapped(client_id=item.client_id, id=found.item_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    item_id: int
    row_id: int | None


def _upsert(scope: IngestScope, kind: str, client_id: str, payload: Mapping[str, Any]) -> _Found:
    kept = {name: value for name, value in payload.items() if name != "cua_rl"}
    statement = insert(IngestItem).values(project_id=scope.project_id, kind=kind, client_id=client_id, payload=kept)
    statement = statement.on_conflict_do_update(
        index_elements=["project_id", "kind", "client_id"],
        set_={"payload": IngestItem.payload.op("||")(statement.excluded.payload)},
    ).returning(IngestItem.id, IngestItem.row_id)
    row = scope.connection.execute(statement).one()
    return _Found(item_id=row.id, row_id=row.row_id)


def _content_id(payload: Mapping[str, Any]) -> str:
    """Items without a client id are known by what they say: sent twice, they are stored once."""
    return "sha256:" + sha256(json.dumps(payload, sort_keys=True, default=str).encode("utf-8", "replace")).hexdigest()


class _Guarded:
    """A savepoint around one item: what is wrong with it becomes an error of the batch."""

    def __init__(self, batch: _Batch, kind: str, index: int, payload: dict[str, Any]) -> None:
        self._batch = batch
        self._kind = kind
        self._index = index
        self._raw = payload
        self.payload: dict[str, Any] = payload
        self._savepoint = batch.scope.connection.begin_nested()

    def parse(self, item_class: type[Any]) -> Any:
        """The item; images in it are stored and replaced by their hashes."""
        _check_depth(self._raw)
        self.payload = store_images(self._batch.scope.connection, self._raw)
        return item_class.model_validate(self.payload)

    def __enter__(self) -> "_Guarded":
        self._batch.num_items += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self._savepoint.commit()
            return False
        self._savepoint.rollback()
        message = _explain(error)
        if message is None:
            return False
        client_id = self._raw.get("client_id")
        self._batch.answer.errors.append(
            ItemError(
                kind=self._kind,
                index=self._index,
                client_id=None if client_id is None else str(client_id)[:500],
                error=message,
            )
        )
        return True


def _explain(error: BaseException) -> str | None:
    """What the sender did wrong; None if it is not the sender's doing."""
    match error:
        case ValidationError():
            problems = error.errors(include_url=False, include_input=False, include_context=False)
            return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in problems[:5])
        case ItemRefused():
            return str(error)
        case IntegrityError() | DataError() | ProgrammingError():
            return "the database refused it: " + str(error.orig).split("\n", 1)[0][:300]
        case DBAPIError():
            return None  # the database is away: the batch has to be sent again
        case StatementError() | ValueError() | TypeError() | OverflowError() | RecursionError():
            return f"expected values of the right types, got {type(error).__name__}"
        case _:
            return None


def _check_depth(payload: object) -> None:
    front, depth = [payload], 0
    while front:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ItemRefused(f"expected JSON at most {_MAX_DEPTH} levels deep, got more")
        front = [inner for value in front for inner in _inner(value)]


def _inner(value: object) -> list[object]:
    match value:
        case dict():
            return [item for item in cast("dict[str, object]", value).values() if isinstance(item, dict | list)]
        case list():
            return [item for item in cast("list[object]", value) if isinstance(item, dict | list)]
        case _:
            return []
