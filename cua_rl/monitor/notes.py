"""Notes and tags that people give a run, a rollout or a turn, and their aliases and pins of runs."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator
from sqlalchemy import delete, func, select

from cua_rl.database.models import Training, TurnRow
from cua_rl.database.monitor_models import NoteRow
from cua_rl.monitor.answers import REFUSALS
from cua_rl.monitor.databases import NotFoundError, RunAccess
from cua_rl.monitor.figures import columns
from cua_rl.monitor.folder_summaries import write_mark
from cua_rl.monitor.rollout_queries import find_rollout
from cua_rl.monitor.run_routes import OpenRun
from cua_rl.monitor.schemas import Note, RunMark
from cua_rl.monitor.security import CanRead, CanWrite, WriteRoute

router = APIRouter(
    prefix="/api/runs/{run_id}",
    tags=["notes"],
    dependencies=[CanRead],
    responses=REFUSALS,
    route_class=WriteRoute,
)
RolloutId = Annotated[str | None, Query(max_length=300, description="notes on this rollout instead of the run's own")]


class NoteRequest(BaseModel):
    """A tag or a text, on the run, one of its rollouts or a turn of it."""

    model_config = ConfigDict(extra="forbid")

    rollout_id: str | None = Field(default=None, max_length=300)
    turn_index: int | None = Field(default=None, ge=0, le=2**31 - 1)
    tag: str | None = Field(default=None, min_length=1, max_length=60, pattern=r"^\S(.*\S)?$")
    text: str | None = Field(default=None, min_length=1, max_length=5000)
    actor: str = Field(min_length=1, max_length=200)

    @model_validator(mode="after")
    def _is_one_thing(self) -> "NoteRequest":
        if (self.tag is None) == (self.text is None):
            raise ValueError("expected a tag or a text, got both or neither; send two notes for both")
        if self.turn_index is not None and self.rollout_id is None:
            raise ValueError("expected rollout_id beside turn_index, got none; a turn belongs to a rollout")
        return self


@router.get("/notes")
async def list_notes(run: OpenRun, rollout_id: RolloutId = None) -> list[Note]:
    """Notes and tags, oldest first."""
    rollout_pk = None if rollout_id is None else (await find_rollout(run, rollout_id)).id
    return await _load_notes(run, rollout_pk)


@router.post("/notes", status_code=201, dependencies=[CanWrite])
async def add_note(run: OpenRun, request: NoteRequest) -> list[Note]:
    """Add a note, or a tag unless it is there already; returns all of the same run or rollout."""
    rollout_pk = None if request.rollout_id is None else (await find_rollout(run, request.rollout_id)).id
    if request.turn_index is not None:
        turn = select(TurnRow.id).where(TurnRow.rollout_pk == rollout_pk, TurnRow.turn_index == request.turn_index)
        if await run.session.scalar(turn) is None:
            raise NotFoundError(
                f"expected a turn of {request.rollout_id!r}, got {request.turn_index}; they count from 0"
            )
    there = [(note.turn_index, note.tag) for note in await _load_notes(run, rollout_pk)]
    if request.tag is None or (request.turn_index, request.tag) not in there:
        fields = request.model_dump(exclude={"rollout_id"})
        run.session.add(NoteRow(training_id=run.training.id, rollout_pk=rollout_pk, **fields))
        await run.session.commit()
    return await _load_notes(run, rollout_pk)


@router.delete("/notes/{note_id}", dependencies=[CanWrite])
async def remove_note(run: OpenRun, note_id: Annotated[int, Path(ge=0, le=2**63 - 1)]) -> list[Note]:
    """Remove a note or tag for good; returns what is left of the same run or rollout."""
    mine = delete(NoteRow).where(NoteRow.training_id == run.training.id, NoteRow.id == note_id)
    removed = (await run.session.execute(mine.returning(NoteRow.rollout_pk))).one_or_none()
    if removed is None:
        raise NotFoundError(
            f"expected a note of {run.training.run_name!r}, got {note_id}; somebody may have removed it"
        )
    await run.session.commit()
    return await _load_notes(run, removed.rollout_pk)


@router.put("/mark", dependencies=[CanWrite])
async def mark_run(run: OpenRun, mark: RunMark) -> RunMark:
    """Name a run and pin it, or not; a folder of its own keeps both for when its database is not open."""
    run.training.alias, run.training.is_pinned = mark.alias, mark.is_pinned
    await run.session.commit()
    if run.database.folder is not None and await run.session.scalar(select(func.count()).select_from(Training)) == 1:
        await asyncio.to_thread(write_mark, run.database.folder, mark)
    return mark


async def _load_notes(run: RunAccess, rollout_pk: int | None) -> list[Note]:
    mine = NoteRow.rollout_pk.is_(None) if rollout_pk is None else NoteRow.rollout_pk == rollout_pk
    query = select(NoteRow).where(NoteRow.training_id == run.training.id, mine).order_by(NoteRow.id)
    return [Note(**columns(row), note_id=row.id) for row in await run.session.scalars(query)]
