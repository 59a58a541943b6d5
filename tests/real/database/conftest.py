"""One real Postgres for all tests of this folder; every test gets a freshly migrated database in it."""

from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.migrations import migrate_blocking
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.session import open_sessions

TEMPLATE = "migrated"


def with_database(url: str, name: str) -> str:
    """The URL of another database of the same embedded server."""
    return url.replace("@/postgres?", f"@/{name}?")


def run_sql(url: str, statement: str) -> list[tuple[object, ...]]:
    """Run one statement outside any transaction and return its rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)  # pyright: ignore[reportArgumentType]
        return cursor.fetchall() if cursor.description else []


def drop_database(server_url: str, name: str) -> None:
    """Drop a database with all its clients. `FORCE` fails at autovacuum, which only Postgres itself may end there."""
    of_clients = f"FROM pg_stat_activity WHERE datname = '{name}' AND backend_type = 'client backend'"
    run_sql(server_url, f"SELECT pg_terminate_backend(pid, 5000) {of_clients}")
    run_sql(server_url, f"DROP DATABASE {name}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[str]:
    folder: Path = tmp_path_factory.mktemp("postgres")
    async with EmbeddedPostgres(folder / "data", folder / "postgres.log") as postgres:
        run_sql(postgres.url, f"CREATE DATABASE {TEMPLATE}")
        migrate_blocking(with_database(postgres.url, TEMPLATE))
        yield postgres.url


@pytest.fixture
def empty_url(server_url: str) -> Generator[str]:
    """A database without tables."""
    run_sql(server_url, "CREATE DATABASE empty")
    yield with_database(server_url, "empty")
    drop_database(server_url, "empty")


@pytest.fixture
def url(server_url: str) -> Generator[str]:
    """A migrated, empty database."""
    run_sql(server_url, f"CREATE DATABASE test TEMPLATE {TEMPLATE}")
    yield with_database(server_url, "test")
    drop_database(server_url, "test")


@pytest_asyncio.fixture
async def session(url: str) -> AsyncGenerator[AsyncSession]:
    async with open_sessions(url) as sessions, sessions() as session:
        yield session
