"""The database that a run records to, and the record of how it ended."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.session import check_connection, database_url
from cua_rl.events import Recorder, TrainingEnded, TrainingStarted
from cua_rl.host.masking import mask_known
from cua_rl.types.errors import ConfigError, DatabaseError, first_error


async def find_database(environ: Mapping[str, str]) -> str | None:
    """The database that the environment names, None for an embedded one; raises `ConfigError` if it does not answer."""
    url = database_url(environ)
    if url is not None:
        try:
            await check_connection(url)
        except DatabaseError as error:
            raise ConfigError(str(error)) from None
    return url


async def open_database(stack: AsyncExitStack, url: str | None, folder: Path) -> str:
    """URL of the configured database, or of an embedded one in the run's folder; migrated to the latest schema."""
    if url is None:
        log_path = folder / "logs" / "postgres.log"
        url = (await stack.enter_async_context(EmbeddedPostgres(folder / "postgres", log_path))).url
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
