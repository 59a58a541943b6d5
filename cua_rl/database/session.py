"""The address of the database, engines and sessions."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from cua_rl.database.screenshots import open_store
from cua_rl.types.errors import ConfigError, DatabaseError

_SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")
_CONNECT_TIMEOUT_S = 3.0
# a page through an index costs hardly more than the next one of a table, in memory and on SSDs: with the default of 4,
# Postgres reads the tables of all runs where one run is meant
_OPTIONS = "-c statement_timeout=120000 -c timezone=UTC -c random_page_cost=1.1"
_CONNECT_ARGUMENTS: dict[str, Any] = {
    "connect_timeout": 3,
    # a host that vanished must not hold a writer for minutes, neither while we send (ms) nor while we wait (s)
    "tcp_user_timeout": 20_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "options": _OPTIONS,
}
_ENGINE_ARGUMENTS: dict[str, Any] = {
    "hide_parameters": True,  # error messages would hold screenshots and prompts
    "connect_args": _CONNECT_ARGUMENTS,
}
# Of a writer whose link was cut, the server does not learn that it has given the connection up: the transaction would
# keep its locks, for which other writers wait, for as long as the server's system keeps dead connections (two hours).
_WRITER_OPTIONS = f"{_OPTIONS} -c idle_in_transaction_session_timeout=30000"


def database_url(environ: Mapping[str, str]) -> str | None:
    """The database that the environment names: DATABASE_URL, or POSTGRES_HOST, _PORT, _DB, _USER and _PASSWORD.

    None if it names none. Raises `ConfigError` for half a set of POSTGRES_ variables or a URL that is not Postgres.
    """
    if environ.get("DATABASE_URL"):
        return _sqlalchemy_url(environ["DATABASE_URL"]).render_as_string(hide_password=False)
    given = {name: environ.get(f"POSTGRES_{name}", "") for name in ("HOST", "PORT", "DB", "USER")}
    if not any(given.values()):
        return None
    missing = [f"POSTGRES_{name}" for name in ("DB", "USER") if not given[name]]
    if missing:
        raise ConfigError(
            f"expected POSTGRES_DB and POSTGRES_USER beside POSTGRES_HOST and POSTGRES_PORT, got no "
            f"{' and no '.join(missing)}; set it, or DATABASE_URL, or unset all of them for the embedded database"
        )
    if not (given["PORT"] or "5432").isdecimal():
        raise ConfigError(f"expected a number in POSTGRES_PORT, got {given['PORT']!r}; the usual one is 5432")
    return URL.create(
        "postgresql+psycopg",
        username=given["USER"],
        password=environ.get("POSTGRES_PASSWORD") or None,
        host=given["HOST"] or "127.0.0.1",
        port=int(given["PORT"] or 5432),
        database=given["DB"],
    ).render_as_string(hide_password=False)


def shown_url(url: str) -> str:
    """The URL without its password, for people and logs."""
    return _sqlalchemy_url(url).render_as_string(hide_password=True)


def make_engine(url: str, *, pool_size: int) -> AsyncEngine:
    """An engine for readers on the event loop; dispose of it when done."""
    return create_async_engine(
        _sqlalchemy_url(url), pool_size=pool_size, max_overflow=10, pool_pre_ping=True, **_ENGINE_ARGUMENTS
    )


def make_writer_engine(url: str) -> Engine:
    """An engine with one connection, for a thread that writes."""
    arguments = {**_ENGINE_ARGUMENTS, "connect_args": {**_CONNECT_ARGUMENTS, "options": _WRITER_OPTIONS}}
    return create_engine(_sqlalchemy_url(url), pool_size=1, max_overflow=0, **arguments)


@asynccontextmanager
async def open_sessions(url: str) -> AsyncGenerator[async_sessionmaker[AsyncSession]]:
    """A session factory for readers; leaving the context closes all connections."""
    engine = make_engine(url, pool_size=10)
    try:
        yield async_sessionmaker(engine, expire_on_commit=False)
    finally:
        await engine.dispose()


async def check_connection(url: str) -> None:
    """Connect once; raises `DatabaseError` within about 3 s if that fails, `ConfigError` for a URL that cannot work."""
    parsed = _sqlalchemy_url(url)
    shown = parsed.render_as_string(hide_password=True)
    target = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            connection = await psycopg.AsyncConnection.connect(target, connect_timeout=3)
            await connection.close()
    except TimeoutError:
        raise DatabaseError(
            f"expected a Postgres server at {shown!r}, got no answer within {_CONNECT_TIMEOUT_S:.0f} s; "
            "check host, port and firewall, or unset DATABASE_URL for the embedded database"
        ) from None
    except psycopg.Error as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DatabaseError(
            f"expected a Postgres server at {shown!r}, got {reason!r}; "
            "check that it runs and that user and password are right, or unset DATABASE_URL for the embedded database"
        ) from None


async def find_database(environ: Mapping[str, str]) -> str | None:
    """`database_url` of a database that answers; raises `ConfigError` if it does not, or for a store without driver."""
    open_store(environ)
    url = database_url(environ)
    if url is not None:
        try:
            await check_connection(url)
        except DatabaseError as error:
            raise ConfigError(str(error)) from None
    return url


def _sqlalchemy_url(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigError(
            "expected DATABASE_URL to read postgresql://user:password@host:port/database, got something that is no URL "
            "(not shown, it may hold a password); percent-encode special characters in user and password"
        ) from None
    if parsed.drivername not in _SCHEMES:
        raise ConfigError(
            f"expected a Postgres URL (postgresql://…), got the scheme {parsed.drivername!r}; "
            "only Postgres is supported, unset DATABASE_URL for the embedded one"
        )
    return parsed.set(drivername="postgresql+psycopg")
