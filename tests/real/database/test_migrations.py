import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory

import cua_rl
from cua_rl.database.migrations import alembic_config, migrate
from cua_rl.database.monitor_models import Base
from cua_rl.database.session import make_writer_engine
from cua_rl.rebuild_database import main as rebuild_database
from tests.real.database.conftest import run_sql, with_database
from tests.real.database.recorded import start
from tests.real.database.test_recorder import record

COLUMNS = """
    SELECT table_name, column_name, data_type, udt_name, is_nullable, column_default, is_identity
    FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version' ORDER BY 1, 2
"""
CONSTRAINTS = """
    SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'alembic_version' ORDER BY 1, 2
"""
INDEXES = """
    SELECT indexname, indexdef FROM pg_indexes
    WHERE schemaname = 'public' AND tablename <> 'alembic_version' ORDER BY 1
"""


def schema(url: str) -> list[list[tuple[object, ...]]]:
    return [run_sql(url, query) for query in (COLUMNS, CONSTRAINTS, INDEXES)]


def test_migrations_go_up_and_down_and_make_what_the_models_say(server_url: str, empty_url: str) -> None:
    config = alembic_config(empty_url)
    run_sql(server_url, "CREATE DATABASE from_models")
    models_url = with_database(server_url, "from_models")
    engine = make_writer_engine(models_url)
    Base.metadata.create_all(engine)
    engine.dispose()

    command.upgrade(config, "head")
    command.downgrade(config, "base")
    assert schema(empty_url) == [[], [], []]
    command.upgrade(config, "head")

    command.check(config)
    assert schema(empty_url) == schema(models_url)
    assert len(ScriptDirectory.from_config(config).get_heads()) == 1
    run_sql(server_url, "DROP DATABASE from_models")


async def test_threads_and_processes_that_migrate_at_once_wait_for_each_other(empty_url: str) -> None:
    async with asyncio.TaskGroup() as group:
        command_lines = [
            group.create_task(asyncio.to_thread(run_alembic, ["upgrade", "head"], {"DATABASE_URL": empty_url}))
            for _ in range(2)
        ]
        for _ in range(3):
            group.create_task(migrate(empty_url))

    assert [done.result().returncode for done in command_lines] == [0, 0]

    assert run_sql(empty_url, "SELECT version_num FROM alembic_version") == [(head(empty_url),)]


def head(url: str) -> str | None:
    return ScriptDirectory.from_config(alembic_config(url)).get_current_head()


def run_alembic(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The command as users run it, inside the package's folder."""
    alembic = Path(sys.executable).parent / "alembic"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DATABASE_", "POSTGRES_"))}
    folder = Path(cua_rl.__file__).parent
    return subprocess.run([alembic, *arguments], cwd=folder, env=kept | environment, capture_output=True, text=True)


def test_the_alembic_command_works_inside_the_package_folder(empty_url: str) -> None:
    done = run_alembic(["upgrade", "head"], {"DATABASE_URL": empty_url})

    assert done.returncode == 0, done.stderr
    assert run_sql(empty_url, "SELECT version_num FROM alembic_version") == [(head(empty_url),)]


def test_the_alembic_command_without_a_database_says_what_to_set() -> None:
    done = run_alembic(["upgrade", "head"], {"DATABASE_URL": ""})

    assert done.returncode != 0
    assert "expected a database in DATABASE_URL" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


async def test_rebuild_asks_first_and_empties_only_our_tables(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await record(url, start())
    run_sql(url, "CREATE TABLE of_someone_else AS SELECT 1 AS number")
    monkeypatch.setenv("DATABASE_URL", url)

    assert await asyncio.to_thread(rebuild_database, []) == 2
    assert "expected a terminal" in capsys.readouterr().err
    assert run_sql(url, "SELECT count(*) FROM trainings") == [(1,)]

    assert await asyncio.to_thread(rebuild_database, ["--yes"]) == 0
    assert "1 trainings" in capsys.readouterr().out
    assert run_sql(url, "SELECT count(*) FROM trainings") == [(0,)]
    assert run_sql(url, "SELECT number FROM of_someone_else") == [(1,)]
