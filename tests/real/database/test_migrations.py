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
from cua_rl.database.models import Base
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

# a run of our own, the same as another monitor's run, and one that some other system sent; each resumed after two steps
OLD_RUNS = """
INSERT INTO projects (name, token_sha256) VALUES ('theirs', 'x');
INSERT INTO trainings (run_name, log_path, config, image_token_id, attempt_id, num_attempts, status, first_step,
    num_completed_steps, total_steps, started_at, heartbeat_at, updated_at)
SELECT 'run', 'folder ' || token, '{}', token, gen_random_uuid(), 2, 'running', 2, 2, 9, now(), now(), now()
FROM unnest(ARRAY[1, 2, 0]) AS token;
INSERT INTO project_runs (training_id, project_id) VALUES (2, 1), (3, 1);
INSERT INTO steps (training_id, step, attempt_id, status, policy_version, group_size, num_groups, num_ended_groups,
    task_pks, started_at, updated_at)
SELECT t.id, number, t.attempt_id, 'completed', 0, 2, 2, 2, '{}', now(), now()
FROM generate_series(0, 2) AS number CROSS JOIN trainings t ORDER BY number;
INSERT INTO evals (training_id, phase, step, attempt_id, status, policy_version, group_size, num_groups,
    num_ended_groups, task_pks, started_at, updated_at)
SELECT id, 'eval', 2, attempt_id, 'completed', 2, 1, 1, 1, '{}', now(), now() FROM trainings;
INSERT INTO checkpoints (training_id, step, state_path, sampler_path) SELECT id, 2, '/2', '/2' FROM trainings;
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


OLD_SCREENS = """
INSERT INTO trainings (run_name, log_path, config, image_token_id, attempt_id, num_attempts, status, first_step,
    num_completed_steps, total_steps, started_at, heartbeat_at)
    VALUES ('run', '/run', '{}', 1, gen_random_uuid(), 1, 'completed', 1, 1, 1, now(), now());
INSERT INTO evals (training_id, phase, step, attempt_id, status, policy_version, group_size, num_groups,
    num_ended_groups, task_pks, started_at)
    VALUES (1, 'eval', 1, gen_random_uuid(), 'completed', 0, 1, 1, 1, '{}', now());
INSERT INTO groups (training_id, eval_id, group_id, group_index, task_id, seed, status, started_at)
    VALUES (1, 1, 'group', 0, 'task', 1, 'completed', now());
INSERT INTO rollouts (training_id, group_pk, rollout_id, task_id, seed, group_index, member_index, status, num_turns,
    started_at)
    SELECT 1, 1, 'rollout ' || number, 'task', 1, 0, number, 'completed', 1, now() FROM generate_series(1, 2) AS number;
INSERT INTO screenshots (sha256, data, format) SELECT name, 'pixels', 'png'
    FROM unnest(ARRAY['before', 'after', 'prompt', 'request', 'unused']) AS name;
INSERT INTO turns (rollout_pk, turn_index, response_id, prompt_token_ids, prompt_chunks, sampled_tokens,
    sampling_logprobs, policy_version, stop, text, prompt_matches_renderer, request, cached_tokens, started_at,
    started_unix_s, duration_s, durations_s, before_sha256, after_sha256)
SELECT rollout, index, 'r', '{}', chunks::jsonb, '{}', '{}', 0, 'stop', '', true,
    '{"messages": [{"content": [{"image_url": {"url": "sha256:request"}}, {"text": "sha256:gone"}]}]}', 0, now(), 0, 0,
    '{}', 'before', nullif(after, '')
FROM (VALUES (1, 0, '[{"text": 3}, {"image": "prompt", "tokens": 4}, {"image": "before", "tokens": 4}]', 'after'),
    (1, 1, '[{"image": "prompt", "tokens": 4}]', ''), (2, 0, '[]', '')) AS given (rollout, index, chunks, after);
"""


def test_images_of_recorded_rollouts_are_found_in_turns_prompts_and_requests(empty_url: str) -> None:
    config = alembic_config(empty_url)
    command.upgrade(config, "0006")
    run_sql(empty_url, OLD_SCREENS)

    command.upgrade(config, "head")

    shown = "SELECT rollout_pk, array_agg(sha256 ORDER BY sha256) FROM rollout_images GROUP BY 1 ORDER BY 1"
    assert run_sql(empty_url, shown) == [(1, ["after", "before", "prompt"]), (2, ["before", "request"])]
    command.downgrade(config, "0006")
    assert run_sql(empty_url, "SELECT count(*) FROM screenshots WHERE data = 'pixels'") == [(5,)]


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


def test_steps_recorded_from_zero_count_from_one_and_those_of_other_systems_stay(empty_url: str) -> None:
    config = alembic_config(empty_url)
    command.upgrade(config, "0003")
    run_sql(empty_url, OLD_RUNS)

    command.upgrade(config, "0004")

    steps = "SELECT training_id, array_agg(step ORDER BY id) FROM steps GROUP BY 1 ORDER BY 1"
    assert run_sql(empty_url, steps) == [(1, [1, 2, 3]), (2, [1, 2, 3]), (3, [0, 1, 2])]
    assert run_sql(empty_url, "SELECT id, first_step FROM trainings ORDER BY id") == [(1, 3), (2, 3), (3, 2)]
    assert run_sql(empty_url, "SELECT DISTINCT step FROM evals") == [(2,)]
    assert run_sql(empty_url, "SELECT DISTINCT step FROM checkpoints") == [(2,)]

    command.downgrade(config, "0003")
    assert run_sql(empty_url, steps) == [(run, [0, 1, 2]) for run in (1, 2, 3)]
    assert run_sql(empty_url, "SELECT DISTINCT first_step FROM trainings") == [(2,)]
