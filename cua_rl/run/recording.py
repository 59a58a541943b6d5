"""The database that a run records to, and the record of how it ended."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import open_own_database
from cua_rl.events import Recorder, TrainingEnded, TrainingStarted
from cua_rl.host.masking import mask_known
from cua_rl.types.errors import first_error


async def start_database(stack: AsyncExitStack, url: str | None, folder: Path) -> str:
    """URL of the configured database, or of an embedded one in the run's folder; migrated to the latest schema."""
    if url is None:
        return await stack.enter_async_context(open_own_database(folder))
    await migrate(url)
    return url


@asynccontextmanager
async def recorded(recorder: Recorder, started: TrainingStarted) -> AsyncGenerator[None]:
    """Record that a run starts and, after the block, how it ended."""
    await recorder.record(started)
    try:
        yield
    except BaseException as error:
        cause = first_error(error)
        is_cancelled = isinstance(cause, asyncio.CancelledError | KeyboardInterrupt)
        ended = TrainingEnded(
            status="cancelled" if is_cancelled else "failed", error=mask_known(f"{type(cause).__name__}: {cause}")
        )
        await asyncio.shield(recorder.record(ended))
        raise
    await recorder.record(TrainingEnded(status="completed"))
    await recorder.flush()
