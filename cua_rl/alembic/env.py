"""How Alembic reaches the database: the URL that our code passes in, else the one of the environment."""

import os
from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from alembic.util import CommandError
from sqlalchemy import text

from cua_rl.database.columns import AnyJson, AnyText, NumberArray
from cua_rl.database.models import Base
from cua_rl.database.session import database_url, make_writer_engine
from cua_rl.host.environment_file import with_environment_file
from cua_rl.types.errors import ConfigError

_MIGRATION_LOCK = 0x637561_726C  # "cua" "rl"; any number that others are unlikely to use


def _url() -> str:
    passed = context.config.attributes.get("url")
    if passed is not None:
        return str(passed)
    try:
        url = database_url(with_environment_file(os.environ))
    except ConfigError as error:
        raise CommandError(str(error)) from None
    if url is None:
        raise CommandError(
            "expected a database in DATABASE_URL (or POSTGRES_HOST, POSTGRES_DB, POSTGRES_USER, POSTGRES_PASSWORD), "
            "got none; set it in the environment or ./.env. Runs with the embedded database migrate it themselves."
        )
    return url


def _render_item(kind: str, item: Any, autogen_context: AutogenContext) -> str | Literal[False]:
    """Write our column types as the plain type below them: migrations must not change when the code does."""
    if kind != "type" or not isinstance(item, AnyText | AnyJson | NumberArray):
        return False
    if isinstance(item, AnyText):
        return "sa.Text()"
    autogen_context.imports.add("from sqlalchemy.dialects import postgresql")
    return "postgresql.JSONB()" if isinstance(item, AnyJson) else f"postgresql.ARRAY(sa.{item.item_type!r})"


if context.is_offline_mode():
    context.configure(url=_url(), target_metadata=Base.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    _engine = make_writer_engine(_url())
    try:
        with _engine.connect() as _connection:
            context.configure(connection=_connection, target_metadata=Base.metadata, render_item=_render_item)
            with context.begin_transaction():
                _connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
                context.run_migrations()
    finally:
        _engine.dispose()
