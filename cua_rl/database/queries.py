"""Queries of runs and their steps; and renaming of a run that was moved."""

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.models import Step, Training


async def latest_trainings(session: AsyncSession, limit: int = 50) -> list[Training]:
    """The most recently started runs, newest first."""
    query = select(Training).order_by(Training.started_at.desc(), Training.id.desc()).limit(limit)
    return list(await session.scalars(query))


async def find_training(session: AsyncSession, run_name: str, log_path: str | None = None) -> Training | None:
    """The newest run of that name (and folder), None if there is none."""
    query = select(Training).where(Training.run_name == run_name)
    if log_path is not None:
        query = query.where(Training.log_path == log_path)
    return await session.scalar(query.order_by(Training.started_at.desc(), Training.id.desc()).limit(1))


async def rename_training(session: AsyncSession, training_id: int, run_name: str, log_path: str) -> None:
    await session.execute(
        update(Training).where(Training.id == training_id).values(run_name=run_name, log_path=log_path)
    )


async def load_steps(session: AsyncSession, training_id: int) -> list[Step]:
    """All steps of a run, in order."""
    return list(await session.scalars(select(Step).where(Step.training_id == training_id).order_by(Step.step)))
