"""The ingest API for runs of projects: parses items, resolves their references, and writes reports to the database.

One transaction per batch, and a savepoint per item, so that a bad item is one error and the rest is stored.
"""

import asyncio
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError
from sqlalchemy import Connection, Engine, Row, Text, func, select, update
from sqlalchemy import cast as cast_to_type
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError, StatementError

from cua_rl.database import reports
from cua_rl.database.models import Environment, Eval, Screenshot, Step, TaskRow, Training
from cua_rl.database.monitor_models import IngestItem, ProjectRun
from cua_rl.database.rows import SourceRow, add_tasks, find_source_by_key
from cua_rl.database.turn_writer import insert_images
from cua_rl.events import Phase
from cua_rl.host.masking import is_line
from cua_rl.host.request_limits import BodyBudget, bearer_key
from cua_rl.monitor import ingest_schemas as sent
from cua_rl.monitor import received
from cua_rl.monitor.answers import REFUSALS
from cua_rl.monitor.databases import Databases
from cua_rl.monitor.ingest_images import PREFIX, take_images
from cua_rl.monitor.projects import find_project, project_of
from cua_rl.monitor.received import ItemRefused
from cua_rl.monitor.schemas import Problem
from cua_rl.monitor.security import Bearer, BodyRoute, unauthorized
from cua_rl.types.errors import CuaError, DatabaseError

_MAX_BYTES = 64 * 2**20
"""Limit for the unanswered batches of a project together."""
_WRONG_TOKEN = "expected the token of a project, got another one"
_PHASES: dict[str, Phase] = {"steps": "step", "baselines": "baseline", "evals": "eval"}
_SENDERS_MISTAKES = (
    *(ValidationError, ItemRefused, DatabaseError, StatementError),
    *(ValueError, TypeError, OverflowError, RecursionError),
)
_Item = TypeVar("_Item", bound=sent.Sent)


class UnknownToken(CuaError):
    """The token belongs to no project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """One project's batch in one transaction."""

    connection: Connection
    project_id: int
    project_name: str
    received_at: datetime

    def require_run(self, training_id: int | None) -> None:
        """Raise `ItemRefused` unless the run is this project's."""
        query = select(ProjectRun.training_id).where(
            ProjectRun.training_id == training_id, ProjectRun.project_id == self.project_id
        )
        if self.connection.scalar(query) is None:
            raise ItemRefused(f"expected the training_id of a run of this project, got {training_id}")

    def find_item(self, kind: str, item_id: int | None) -> Row[int, int | None, dict[str, Any]]:
        """id, row_id and payload of an item that was sent before; raises `ItemRefused`."""
        query = select(IngestItem.id, IngestItem.row_id, IngestItem.payload).where(
            IngestItem.id == item_id, IngestItem.project_id == self.project_id, IngestItem.kind == kind
        )
        row = self.connection.execute(query).one_or_none()
        if row is None:
            raise ItemRefused(f"expected the id of an item among {kind}, got {item_id}; send that item first")
        return row

    def require_row(self, kind: str, item_id: int | None) -> int:
        """Key of the row that was made of an item; raises `ItemRefused`."""
        row_id = self.find_item(kind, item_id).row_id
        if row_id is None:
            raise ItemRefused(f"expected the id of an item among {kind} that is shown, got {item_id}")
        return row_id


class _IngestRoute(BodyRoute):
    """A route for projects: their token is looked up before a body is read."""

    async def admit(self, request: Request) -> BodyBudget:
        token = bearer_key(request)
        databases: Databases = request.app.state.databases
        if not token:
            raise unauthorized("expected a project's token, got none")
        async with databases.main.sessions() as session:
            project = (await session.execute(project_of(token))).one_or_none()
        if project is None:
            raise unauthorized(_WRONG_TOKEN)
        return request.app.state.ingest_budgets.setdefault(project.id, BodyBudget(_MAX_BYTES))


router = APIRouter(prefix="/api/ingest", tags=["ingest"], route_class=_IngestRoute)


async def ingest_engine(request: Request) -> Engine:
    return request.app.state.databases.writer_engine


@router.post("/batch", responses=REFUSALS | {422: {"model": sent.IngestAnswer | Problem}})
async def ingest_batch(
    batch: sent.IngestBatch,
    bearer: Bearer,
    engine: Annotated[Engine, Depends(ingest_engine)],
    request: Request,
    response: Response,
) -> sent.IngestAnswer:
    """Store runs, tasks, steps, rollouts and turns that a project sends.

    An item whose `client_id` was sent before is updated. Items that cannot be stored are listed in `errors`, the others
    are stored; the status is 422 only if nothing was stored.
    """
    try:
        async with request.app.state.ingest_turn:  # waiting for the database's one writer takes no thread
            answer = await asyncio.to_thread(ingest, engine, bearer.credentials if bearer else "", batch)
    except UnknownToken as error:
        raise unauthorized(str(error)) from None
    num_sent = sum(len(getattr(batch, kind)) for kind in sent.ITEM_CLASSES) + (batch.training is not None)
    if num_sent and len(answer.errors) == num_sent:
        response.status_code = 422
    return answer


def ingest(engine: Engine, token: str, batch: sent.IngestBatch) -> sent.IngestAnswer:
    """Store a batch; what could not be stored is in `errors`. Blocking.

    Raises:
        UnknownToken: no project has this token.
    """
    with engine.begin() as connection:
        project = find_project(connection, token)
        if project is None:
            raise UnknownToken(_WRONG_TOKEN)
        ours = _Batch(
            connection=connection, project_id=project[0], project_name=project[1], received_at=datetime.now(UTC)
        )
        answer = sent.IngestAnswer()
        if batch.training is not None:
            with _savepoint(ours, answer, "training", 0, batch.training):
                answer.training_id = _store_training(ours, batch.training)
        for kind, item_class in sent.ITEM_CLASSES.items():
            stored: list[sent.Mapped] = getattr(answer, kind)
            payloads: list[dict[str, Any]] = getattr(batch, kind)
            for index, payload in enumerate(payloads):
                with _savepoint(ours, answer, kind, index, payload):
                    stored.append(_store_item(ours, kind, item_class, payload))
        return answer


@contextmanager
def _savepoint(
    batch: _Batch, answer: sent.IngestAnswer, kind: str, index: int, payload: Mapping[str, Any]
) -> Generator[None]:
    """Store an item wholly or not at all; what is wrong with it becomes an error of the batch."""
    try:
        with batch.connection.begin_nested():
            yield
    except _SENDERS_MISTAKES as error:
        if isinstance(error, DBAPIError) and not isinstance(error, IntegrityError | DataError | ProgrammingError):
            raise  # the database is unreachable: the batch has to be sent again
        client_id = payload.get("client_id")
        shown_id = None if client_id is None else str(client_id)[:500]
        answer.errors.append(sent.ItemError(kind=kind, index=index, client_id=shown_id, error=_explain(error)))


def _explain(error: BaseException) -> str:
    """What the sender did wrong."""
    match error:
        case ValidationError():
            problems = error.errors(include_url=False, include_input=False, include_context=False)
            return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in problems[:5])
        case CuaError():
            return str(error)
        case DBAPIError():
            return "the database refused it: " + str(error.orig).split("\n", 1)[0][:300]
        case _:
            return f"expected values of the right types, got {type(error).__name__}"


def _parse(batch: _Batch, item_class: type[_Item], payload: dict[str, Any]) -> tuple[_Item, dict[str, Any]]:
    """The item, and its payload; images in it are stored and replaced by their hashes."""
    without_images, images = take_images(payload)
    if images:
        insert_images(batch.connection, images)
    return item_class.model_validate(without_images), without_images


def _store_training(batch: _Batch, payload: dict[str, Any]) -> int:
    """Insert or update a run, found by its training_id, or by its run_name within the project."""
    item, payload = _parse(batch, sent.SentTraining, payload)
    connection = batch.connection
    if item.training_id is not None:
        batch.require_run(item.training_id)
        known = select(Training.run_name, Training.log_path).where(Training.id == item.training_id)
        run_name, folder = connection.execute(known).one()
    elif item.run_name and is_line(item.run_name):  # folders of different machines may have equal names
        run_name, folder = item.run_name, f"{batch.project_name}: {item.log_path or item.run_name}"
        found = connection.scalar(select(Training.id).where(Training.run_name == run_name, Training.log_path == folder))
        if found is not None:
            batch.require_run(found)
    else:
        raise ItemRefused("expected a run_name of one line, or the training_id of a run that was sent before")
    report = received.training_report(item, payload, run_name, folder)
    training_id = reports.write_training(connection, report, batch.received_at)
    length = select(func.length(cast_to_type(Training.config, Text))).where(Training.id == training_id)
    received.require_short_settings(connection.scalar(length) or 0)  # earlier ones stay
    mine = insert(ProjectRun).values(training_id=training_id, project_id=batch.project_id)
    connection.execute(mine.on_conflict_do_nothing())
    return training_id


def _store_item(batch: _Batch, kind: str, item_class: type[sent.Sent], payload: dict[str, Any]) -> sent.Mapped:
    item, stored = _parse(batch, item_class, payload)
    client_id = item.client_id
    if not client_id:  # an item without one is identified by its content: sent twice, it is stored once
        content = json.dumps(payload, sort_keys=True, default=str).encode("utf-8", "replace")
        client_id = "sha256:" + sha256(content).hexdigest()
    kept = {name: value for name, value in stored.items() if name != "cua_rl"}
    statement = insert(IngestItem).values(project_id=batch.project_id, kind=kind, client_id=client_id, payload=kept)
    statement = statement.on_conflict_do_update(
        index_elements=["project_id", "kind", "client_id"],
        set_={"payload": IngestItem.payload.op("||")(statement.excluded.payload)},
    ).returning(IngestItem.id, IngestItem.row_id)
    known = batch.connection.execute(statement).one()
    row_id = _store_row(batch, kind, item, known.id)
    if row_id != known.row_id:
        batch.connection.execute(update(IngestItem).where(IngestItem.id == known.id).values(row_id=row_id))
    return sent.Mapped(client_id=item.client_id, id=known.id)


def _store_row(batch: _Batch, kind: str, item: sent.Sent, item_id: int) -> int | None:
    """Insert or update the row that belongs to an item; returns its key, None if the item has no row (yet)."""
    connection = batch.connection
    match item:
        case sent.SentTask():
            return add_tasks(connection, [received.task_of(item)])[0]
        case sent.SentEnvironment():
            # it has a row from the moment at which a rollout uses it
            known = batch.find_item("environments", item_id)
            query = select(Environment.rollout_pk).where(Environment.id == known.row_id)
            used_by = None if known.row_id is None else batch.connection.scalar(query)
            return known.row_id if used_by is None else _write_device(batch, used_by, known.payload)
        case sent.SentSource():
            batch.require_run(item.training_id)
            return reports.write_source(connection, received.source_report(item, _PHASES[kind]), batch.received_at)
        case sent.SentRollout():
            return _store_rollout(batch, item)
        case sent.SentTurn():
            rollout_pk = batch.require_row("rollouts", item.rollout_id)
            columns = received.turn_columns(item) | _screens(batch, item)
            index, response_id = item.turn - 1, f"ingest-{item_id}"  # the interface counts turns from 1, we from 0
            at = batch.received_at
            return reports.write_turn(connection, rollout_pk, index, columns, at, response_id=response_id)
        case sent.SentAction():
            turn_pk = batch.require_row("turns", item.turn_id)
            return reports.change_turn(connection, turn_pk, received.action_columns(item))
        case sent.SentObservation():
            turn_pk = batch.require_row("turns", item.turn_id)
            return reports.change_turn(connection, turn_pk, _observation_columns(batch, item))
        case sent.SentValidation():
            rollout_pk = batch.require_row("rollouts", item.rollout_id)
            return reports.write_validation(connection, rollout_pk, received.validation_of(item))
        case _:
            return None


def _store_rollout(batch: _Batch, item: sent.SentRollout) -> int:
    """The rollout, with the group that it implies and the device that it uses."""
    task = None
    if item.task_id is not None:
        query = select(TaskRow.id, TaskRow.task_id, TaskRow.seed)
        task = batch.connection.execute(
            query.where(TaskRow.id == batch.require_row("tasks", item.task_id))
        ).one_or_none()
    ours, number = item.cua_rl, item.group_num or 0
    seed = ours.seed if ours.seed is not None else 0 if task is None else task.seed
    rollout_pk = reports.write_rollout(
        batch.connection,
        _find_source(batch, item),
        batch.received_at,
        group_id=(ours.group_id or f"group-{number}")[:200],
        group_index=number,
        task={"task_pk": None, "task_id": "unknown", "seed": seed}
        if task is None
        else {"task_pk": task.id, "task_id": task.task_id, "seed": seed},
        rollout_id=item.rollout_id,
        member_index=item.env_index or 0,
        columns=received.rollout_columns(item),
        judgement=received.judgement_of(ours.judgement),
    )
    if item.env_id is not None:
        environment = batch.find_item("environments", item.env_id)
        row_id = _write_device(batch, rollout_pk, environment.payload)
        batch.connection.execute(update(IngestItem).where(IngestItem.id == item.env_id).values(row_id=row_id))
    return rollout_pk


def _find_source(batch: _Batch, item: sent.SentRollout) -> SourceRow:
    """The step or evaluation that the rollout says it belongs to."""
    given = {"steps": item.step_id, "evals": item.eval_id, "baselines": item.baseline_id}
    if item.source_type is not None:
        wanted = f"{item.source_type}s"
        given = {kind: key for kind, key in given.items() if kind == wanted}
    kind, item_id = next(((kind, key) for kind, key in given.items() if key is not None), (None, None))
    if kind is None:
        raise ItemRefused("expected one of step_id, eval_id and baseline_id, that of the source_type, got none")
    row_id = batch.require_row(kind, item_id)
    found = find_source_by_key(batch.connection, Step if kind == "steps" else Eval, row_id)
    if found is None:
        raise ItemRefused(f"expected a parent that is still there, got {kind} {item_id}; send it again")
    return found


def _write_device(batch: _Batch, rollout_pk: int, payload: Mapping[str, Any]) -> int:
    columns = received.device_columns(sent.SentEnvironment.model_validate(payload))
    return reports.write_device(batch.connection, rollout_pk, columns)


def _screens(batch: _Batch, item: sent.SentTurn) -> dict[str, str]:
    """Hashes of screenshots that are stored; one that is announced by its hash must have been sent."""
    found: dict[str, str] = {}
    for column, value in (("before_sha256", item.screen_before), ("after_sha256", item.screen_after)):
        digest = _stored_hash(batch, value)
        if digest is not None:
            found[column] = digest
        elif value is not None and value.startswith(PREFIX):
            raise ItemRefused(f"expected a screenshot that was sent before, got {value[:80]!r}; send it as a data URI")
    return found


def _observation_columns(batch: _Batch, item: sent.SentObservation) -> dict[str, Any]:
    """A screenshot before or after the turn, or what the model was asked."""
    columns: dict[str, Any] = {}
    digest = _stored_hash(batch, item.screenshot_uri)
    column = {"screenshot_before": "before_sha256", "screenshot_after": "after_sha256"}.get(item.obs_type or "")
    if digest is not None and column is not None:
        columns[column] = digest
    request = received.request_of(item.model_input_json)
    if request is not None and item.obs_type == "model_input":
        columns["request"] = request
    return columns


def _stored_hash(batch: _Batch, reference: str | None) -> str | None:
    """The hash of `sha256:<hex>` if there is such a screenshot."""
    if reference is None or not reference.startswith(PREFIX):
        return None
    query = select(Screenshot.sha256).where(Screenshot.sha256 == reference.removeprefix(PREFIX))
    return batch.connection.scalar(
        query.where(Screenshot.removed_at.is_(None)).with_for_update(read=True, key_share=True)
    )
