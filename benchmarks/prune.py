"""How long do pruning and the pages of the monitor take with 100,000 rollouts in the database?

    python -m benchmarks.prune [--rollouts 100000] [--turns 5] [--screen-kb 0.1] [--requests 20]

The rows are made by SQL: a trained run whose rollouts, half of them successes, show a screenshot of their own before
and after each turn. One JSON line a figure; before each, the rows that it is about are counted, and after
it those that are gone. `monitor_api` has every read route of the monitor, before and after pruning
(`benchmarks.monitor_api`).
"""

import argparse
import asyncio
import json
import os
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import psutil
from sqlalchemy import Connection, Engine, text

from benchmarks.monitor_api import cpu_s, measure_route, routes, serve_run
from cua_rl.database.prune import choose_rollouts, measure, prune_rollouts, prune_unused
from cua_rl.database.session import make_writer_engine
from scripts.monitor_process import scratch_postgres
from scripts.seed_monitor import MODEL

PER_STEP, PER_GROUP, BATCH, NUM_UNUSED = 128, 8, 100, 50_000
TARGET_S_PER_1000 = 1.0

_ROWS = (
    """INSERT INTO trainings (run_name, log_path, config, image_token_id, attempt_id, num_attempts, status,
        first_step, num_completed_steps, total_steps, started_at, ended_at, heartbeat_at)
       VALUES ('large', '/large', jsonb_build_object('model_path', CAST(:model AS text)), 151655, gen_random_uuid(),
        1, 'completed', 1, :steps, :steps, now() - interval '2 days', now() - interval '1 day', now())""",
    """INSERT INTO tasks (definition_sha256, task_id, seed, instruction, category, difficulty, max_turns, tags)
       SELECT md5(n::text), 'task ' || n, 1, 'Open page ' || n, 'system', 'easy', 10, '{}'
       FROM generate_series(1, 50) n""",
    """INSERT INTO steps (training_id, step, attempt_id, status, policy_version, trained_policy_version, group_size,
        num_groups, num_ended_groups, task_pks, datums_sha256, num_datums, metrics, started_at, rollouts_ended_at,
        ended_at)
       SELECT 1, n, t.attempt_id, 'completed', n - 1, n, :per_group, :per_step / :per_group, :per_step / :per_group,
        '{}', md5(n::text), :per_step, jsonb_build_object('reward/mean', 0.5), t.started_at + n * interval '1 minute',
        t.started_at + n * interval '1 minute', t.started_at + n * interval '1 minute'
       FROM trainings t, generate_series(1, :steps) n""",
    """INSERT INTO groups (training_id, step_id, group_id, group_index, task_pk, task_id, seed, status, num_rollouts,
        num_faulty, num_successes, reward_mean, reward_std, started_at, ended_at)
       SELECT 1, s.id, md5('g' || s.step || ':' || n), n, 1 + (s.step * 7 + n) % 50,
        'task ' || 1 + (s.step * 7 + n) % 50, 1, 'completed', :per_group, 0, :per_group / 2, 0.5, 0.5, s.started_at,
        s.ended_at
       FROM steps s, generate_series(0, :per_step / :per_group - 1) n""",
    """INSERT INTO rollouts (training_id, group_pk, task_pk, rollout_id, task_id, seed, group_index, member_index,
        position, device_id, max_turns, status, num_turns, stop_reason, success, reward, reward_parts, advantage,
        answer, max_gap, max_log_ratio, min_logprob, started_at, started_unix_s, duration_s, ended_at)
       SELECT 1, g.id, g.task_pk, md5('r' || g.id || ':' || n), g.task_id, 1, g.group_index, n, n, 'phone ' || n, 10,
        'completed', :turns, 'finished', n % 2 = 0, (n % 2 = 0)::int, '{}', 0.0, 'page ' || n,
        0.0, 0.0, -0.5, g.started_at,
        extract(epoch FROM g.started_at), duration, g.started_at + duration * interval '1 second'
       FROM groups g, generate_series(0, :per_group - 1) n,
        LATERAL (SELECT 5 + (g.id * 101 + n * 37) % 997 / 100.0) d(duration)""",
    """INSERT INTO validations (rollout_pk, query, expected, actual, success, duration_s)
       SELECT id, 'page', 'page ' || seed, 'page ' || member_index, success, 0.1 FROM rollouts""",
    """INSERT INTO screenshots (sha256, data, format, width_px, height_px, size_bytes, created_at)
       SELECT encode(sha256((r.id || ':' || n)::bytea), 'hex'), (SELECT
        string_agg(sha256((r.id || ':' || n || ':' || i)::bytea), '') FROM generate_series(1, :hashes) i),
        'png', 320, 640, 32 * :hashes, r.started_at
       FROM rollouts r, generate_series(0, :turns) n""",
    """INSERT INTO turns (rollout_pk, turn_index, response_id, prompt_token_ids, prompt_chunks, sampled_tokens,
        sampling_logprobs, training_logprobs, policy_version, stop, text, prompt_matches_renderer, request,
        cached_tokens, started_at, started_unix_s, duration_s, durations_s, action, before_sha256, after_sha256)
       SELECT r.id, n, md5('t' || r.id || ':' || n), array_fill(7, ARRAY[200]), '[{"text": 200}]',
        array_fill(9, ARRAY[20]), array_fill(-0.5::float, ARRAY[20]), array_fill(-0.5::float, ARRAY[20]), 0, 'stop',
        'done', true, '{}', 0, r.started_at, r.started_unix_s, 1.0, '{"respond": 1.0}',
        '{"type": "Click", "x": 3, "y": 4}', encode(sha256((r.id || ':' || n)::bytea), 'hex'),
        encode(sha256((r.id || ':' || n + 1)::bytea), 'hex')
       FROM rollouts r, generate_series(0, :turns - 1) n""",
    """INSERT INTO rollout_images (rollout_pk, sha256)
       SELECT r.id, encode(sha256((r.id || ':' || n)::bytea), 'hex') FROM rollouts r, generate_series(0, :turns) n""",
    """INSERT INTO screenshots (sha256, data, format, width_px, height_px, size_bytes, created_at)
       SELECT encode(sha256(('unused' || n)::bytea), 'hex'), 'x', 'png', 1, 1, 1, now() - interval '1 day'
       FROM generate_series(1, :unused) n""",
)


def fill(engine: Engine, given: argparse.Namespace) -> None:
    """Make the rows; counts them."""
    steps, num_turns, hashes = given.rollouts // PER_STEP, given.turns, round(given.screen_kb * 1000 / 32)
    values = {"model": str(MODEL), "steps": steps, "turns": num_turns, "unused": NUM_UNUSED, "hashes": hashes}
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        for statement in _ROWS:
            connection.execute(text(statement), values | {"per_step": PER_STEP, "per_group": PER_GROUP})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE"))
        counts = {name: count(connection, name) for name in ("rollouts", "turns", "screenshots", "rollout_images")}
    num_made = steps * PER_STEP
    assert counts["rollouts"] == num_made, counts
    assert counts["turns"] == num_made * num_turns, counts
    assert counts["screenshots"] == counts["rollout_images"] + NUM_UNUSED == num_made * (num_turns + 1) + NUM_UNUSED
    print_figure("prune_rows", **counts)


def count(connection: Connection, table: str, condition: str = "true") -> int:
    return connection.execute(text(f"SELECT count(*) FROM {table} WHERE {condition}")).scalar_one()


def print_figure(figure: str, **values: object) -> None:
    print(json.dumps({"figure": figure, "load": round(os.getloadavg()[0], 1), **values}), flush=True)


def used_cpu_s(postgres: list[psutil.Process]) -> float:
    """Processor time so far of this process and the database."""
    return time.process_time() + sum(cpu_s(postgres))


def prune_half(engine: Engine, processes: list[psutil.Process], *, is_deleting: bool) -> None:
    """Prune the successes, or delete the others."""
    chosen = choose_rollouts(
        1,
        keep="successes" if is_deleting else "failures",
        ended_before=None,
        before_step=None,
        is_deleting=is_deleting,
    )
    with engine.begin() as connection:
        clock = time.perf_counter()
        expected = measure(connection, chosen)
        expected_s = time.perf_counter() - clock
        rollouts, images = count(connection, "rollouts"), count(connection, "screenshots", "data IS NOT NULL")
    clock, used = time.perf_counter(), used_cpu_s(processes)
    slowest_s = 0.0
    with engine.begin() as connection:
        keys = connection.scalars(chosen).all()
    for start in range(0, len(keys), BATCH):
        began = time.perf_counter()
        with engine.begin() as connection:
            prune_rollouts(connection, keys[start : start + BATCH], is_deleting=is_deleting)
        slowest_s = max(slowest_s, time.perf_counter() - began)
    seconds, used = time.perf_counter() - clock, used_cpu_s(processes) - used
    with engine.begin() as connection:
        num_deleted = rollouts - count(connection, "rollouts")
        num_images = images - count(connection, "screenshots", "data IS NOT NULL")
    assert num_images == expected[0] > 0, (num_images, expected)
    assert num_deleted == (len(keys) if is_deleting else 0)
    print_figure(
        "prune_delete" if is_deleting else "prune_screenshots",
        rollouts=len(keys),
        screenshots=num_images,
        s_per_1000_rollouts=round(1000 * seconds / len(keys), 3),
        cpu_s_per_1000_rollouts=round(1000 * used / len(keys), 3),
        target_s_per_1000_rollouts=TARGET_S_PER_1000,
        slowest_transaction_s=round(slowest_s, 3),
        dry_run_s=round(expected_s, 2),
    )


def prune_orphans(engine: Engine, processes: list[psutil.Process]) -> None:
    """Remove the screenshots that no rollout shows."""
    for expected in (NUM_UNUSED, 0):
        with engine.begin() as connection:
            screenshots, turns = count(connection, "screenshots"), count(connection, "turns")
        clock, used = time.perf_counter(), used_cpu_s(processes)
        for _ in prune_unused(engine):
            pass
        times = {"seconds": time.perf_counter() - clock, "cpu_s": used_cpu_s(processes) - used}
        with engine.begin() as connection:
            removed = screenshots - count(connection, "screenshots")
        assert removed == expected, removed
        rounded = {name: round(value, 2) for name, value in times.items()}
        print_figure("prune_unused", screenshots=screenshots, turns=turns, removed=removed, **rounded)


async def main(given: argparse.Namespace) -> None:
    """Fill, ask, prune, ask again, delete."""
    async with AsyncExitStack() as stack:
        url, folder = await stack.enter_async_context(scratch_postgres())
        engine = make_writer_engine(url)
        stack.push_async_callback(asyncio.to_thread, engine.dispose)
        await asyncio.to_thread(fill, engine, given)
        served = await stack.enter_async_context(serve_run(url, folder))
        for is_pruned in (False, True):
            now = replace(served, paths=await routes(served.client))
            for name in now.paths:
                await measure_route([now], name, given.requests)
            if not is_pruned:
                await asyncio.to_thread(prune_orphans, engine, served.processes[1:])
            await asyncio.to_thread(prune_half, engine, served.processes[1:], is_deleting=is_pruned)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--screen-kb", type=float, default=0.1)
    parser.add_argument("--requests", type=int, default=20)
    asyncio.run(main(parser.parse_args()))
