"""Brings a database's schema up to date with Alembic."""

import asyncio
from pathlib import Path
from threading import Lock

from alembic import command
from alembic.config import Config

from cua_rl.database.session import shown_url
from cua_rl.types.errors import DatabaseError, boundary

_ALEMBIC_LOCK = Lock()  # Alembic keeps its context in module globals
_ALEMBIC_INI = Path(__file__).resolve().parent.parent / "alembic.ini"


async def migrate(url: str) -> None:
    """Bring the schema up to date; several processes may try at once. Raises `DatabaseError` if it cannot be done."""
    await asyncio.to_thread(migrate_blocking, url)


def migrate_blocking(url: str) -> None:
    """`migrate` for code without an event loop."""
    config = alembic_config(url)
    with _ALEMBIC_LOCK, boundary(DatabaseError, f"cannot migrate {shown_url(url)}"):
        command.upgrade(config, "head")


def alembic_config(url: str) -> Config:
    """Alembic's settings for a database of our choice; says nothing unless something is wrong."""
    config = Config(_ALEMBIC_INI)
    config.attributes["url"] = url
    return config
