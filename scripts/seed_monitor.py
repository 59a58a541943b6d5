"""Fill a database for the monitor: `python -m scripts.seed_monitor DATABASE_URL [--rollouts 10000] [--turns 10]`.

A scripted policy taps at random on simulated phones: those rollouts are recorded as a run records them, and copied
inside the database until there are enough. Rewards, advantages and metrics of the copies are made up. With `--live
SECONDS` the run then goes on for a while with new rollouts, eight at a time, each turn of which takes `--turn-s`.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from math import exp
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import psycopg
from psycopg.types.json import Jsonb
from sqlalchemy.engine import make_url

import cua_rl.models
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.database.migrations import migrate
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.pool import DevicePool
from cua_rl.events import (
    EvaluationEnded,
    GroupEnded,
    Recorder,
    RolloutSource,
    SourceStarted,
    StepTrained,
    TrainingEnded,
    TrainingStarted,
)
from cua_rl.renderers.renderer import make_renderer
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rl.advantages import group_advantages
from cua_rl.rollout.group import GroupJob, collect_groups, run_group
from cua_rl.rollout.run import RolloutRunner
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.task import Task
from cua_rl.types.rollout import RolloutGroup, SamplingParams
from scripts.random_taps import RandomTaps

MODEL = Path(cua_rl.models.__file__).parent / "tiny_qwen3_vl"
GROUPS, MEMBERS, TEMPLATE_STEPS = 16, 8, 3
PARAMS = SamplingParams(max_tokens=48, temperature=1.0)


def step_metrics(step: int, num_steps: int, rng: random.Random) -> dict[str, float]:
    """Metrics of a run that learns: curves with noise, all made up."""
    done = step / max(1, num_steps)
    success = 0.15 + 0.75 / (1 + exp(-8 * (done - 0.4))) + rng.gauss(0, 0.03)
    success = min(1.0, max(0.0, success))
    return {
        "progress/step": step,
        "reward/mean": success,
        "reward/success_rate": success,
        "reward/constant_group_frac": abs(2 * success - 1) * 0.8,
        "loss/policy": rng.gauss(-0.03, 0.02),
        "loss/total": rng.gauss(-0.03, 0.02),
        "policy/parity_mean_abs": rng.uniform(0.001, 0.003),
        "policy/kl_sampling_training/mean": rng.uniform(0, 0.002),
        "policy/entropy_estimate": 0.7 - 0.4 * done + rng.gauss(0, 0.02),
        "policy/ratio_max": 1 + rng.expovariate(30),
        "policy/ratio_min": 1 - rng.uniform(0, 0.1),
        "optim/grad_norm": rng.uniform(0.05, 0.4),
        "optim/learning_rate": 2e-3 * (1 - 0.95 * done),
        "rollout/policy_lag/mean": rng.uniform(0, 1),
        "rollout/policy_lag/max": float(rng.randrange(3)),
        "rollout/num_turns/mean": 10.0,
        "rollout/parse_failure_frac": 0.03 * (1 - done),
        "rollout/sampled_tokens": 1000.0 + 100 * step,
        "time/step_s": rng.uniform(10, 14),
        "time/rollouts_s": rng.uniform(6, 8),
        "time/train_s": rng.uniform(3, 5),
        "time/publish_s": rng.uniform(0.1, 0.3),
        "time/save_s": rng.uniform(0.05, 0.2),
        "time/tokens_per_s": rng.uniform(140, 460),
        "device/busy_frac": rng.uniform(0.6, 0.95),
        "stop/max_turns": 1 - success / 2,
        "stop/finished": success / 2,
        "trainer/busy_s": rng.uniform(3, 5),
        "trainer/mfu_frac": rng.uniform(0.2, 0.4),
        "trainer/peak_reserved_gib": rng.uniform(40, 60),
    }


async def run_source(
    recorder: Recorder, policy: RandomTaps, source: RolloutSource, *, num_groups: int, turns: int, pause_s: float = 0.0
) -> list[RolloutGroup]:
    """Run and record one step or evaluation."""
    split = "train" if source.phase == "step" else "eval"
    task_set = load_tasks({"source_type": f"demo_{'training' if split == 'train' else 'eval'}"}, seed=0, split=split)
    tasks = task_set.batch(source.step - 1, num_groups) if split == "train" else task_set.held_out(num_groups)
    tasks = [replace(task, max_turns=turns) for task in tasks]
    size = MEMBERS if split == "train" else 1
    await recorder.record(
        SourceStarted(source=source, tasks=tuple(tasks), group_size=size, policy_version=policy.policy_version)
    )
    phones = SimulatedPhones(scale=1)
    async with phones:
        runner = RolloutRunner(
            devices=DevicePool(phones.make, max_devices=8),
            gateway=policy,
            agent=GBoxAgent(),
            reward=load_reward("binary"),
            recorder=recorder,
            max_turns=turns,
        )

        async def record_end(group: RolloutGroup, _: Task | None) -> RolloutGroup:
            advantages = group_advantages(group.rewards, "mean_std") if split == "train" else None
            await recorder.record(GroupEnded(source=source, group=group, advantages=advantages))
            await asyncio.sleep(pause_s)
            return group

        job = GroupJob(source=source, group_size=size, params=PARAMS)
        return await collect_groups(tasks, partial(run_group, runner, job=job), record_end)


async def train(recorder: Recorder, policy: RandomTaps, step: int, groups: Sequence[RolloutGroup]) -> None:
    """Pretend to have trained: the trainer's log-probabilities are the sampler's with a little noise."""
    rng = random.Random(step)
    logprobs = {
        rollout.rollout_id: tuple(
            (turn.index, tuple(value + rng.gauss(0, 0.002) for value in turn.model.sampling_logprobs))
            for turn in rollout.turns
        )
        for group in groups
        for rollout in group.rollouts
        if not group.is_constant
    }
    policy.policy_version = step
    await recorder.record(
        StepTrained(
            step=step,
            policy_version=step,
            datums_sha256=f"{step:064x}",
            num_datums=len(logprobs),
            training_logprobs=logprobs,
            metrics=step_metrics(step, 100, rng),
        )
    )


def begin(name: str, num_steps: int) -> TrainingStarted:
    """The start of a made-up run."""
    config = {"model_name": None, "model_path": str(MODEL), "group_size": MEMBERS, "groups_per_batch": GROUPS}
    return TrainingStarted(
        run_name=name,
        log_path=f"seeded/{name}",
        config=config | {"learning_rate": 2e-3},
        first_step=1,
        total_steps=num_steps,
    )


async def record_templates(recorder: Recorder, policy: RandomTaps, turns: int) -> None:
    """Record the rollouts of which copies are made."""
    for phase, step in (
        ("baseline", 0),
        *(("step", step) for step in range(1, TEMPLATE_STEPS + 1)),
        ("eval", TEMPLATE_STEPS),
    ):
        source = RolloutSource(phase=cast("Any", phase), step=step)
        groups = await run_source(recorder, policy, source, num_groups=GROUPS, turns=turns)
        if phase == "step":
            await train(recorder, policy, step, groups)
        else:
            await recorder.record(EvaluationEnded(source=source, metrics={}))


async def go_on(recorder: Recorder, policy: RandomTaps, *, first_step: int, turns: int, live_s: float) -> int:
    """Steps of 32 rollouts until the time is over; returns how many."""
    ends, step = time.monotonic() + live_s, first_step
    while time.monotonic() < ends:
        source = RolloutSource(phase="step", step=step)
        groups = await run_source(recorder, policy, source, num_groups=4, turns=turns)
        await train(recorder, policy, step, groups)
        step += 1
    return step - first_step


_COPIES = (
    """INSERT INTO steps (training_id, step, attempt_id, status, policy_version, trained_policy_version, group_size,
        num_groups, num_ended_groups, task_pks, datums_sha256, num_datums, metrics, started_at, rollouts_ended_at,
        ended_at)
       SELECT s.training_id, %(step)s, s.attempt_id, 'completed', %(step)s - 1, %(step)s, s.group_size, s.num_groups,
        s.num_ended_groups, s.task_pks, md5(%(step)s::text), s.num_datums, %(metrics)s, s.started_at + %(later)s,
        s.rollouts_ended_at + %(later)s, s.ended_at + %(later)s
       FROM steps s WHERE s.training_id = %(run)s AND s.step = %(template)s""",
    """INSERT INTO groups (training_id, step_id, group_id, group_index, task_pk, task_id, seed, status, num_rollouts,
        num_faulty, num_successes, reward_mean, reward_std, started_at, ended_at)
       SELECT g.training_id, copy.id, md5(g.group_id || %(step)s), g.group_index, g.task_pk, g.task_id, g.seed,
        g.status, g.num_rollouts, g.num_faulty, g.num_successes, g.reward_mean, g.reward_std, g.started_at + %(later)s,
        g.ended_at + %(later)s
       FROM groups g JOIN steps s ON s.id = g.step_id JOIN steps copy ON copy.training_id = s.training_id
       WHERE s.training_id = %(run)s AND s.step = %(template)s AND copy.step = %(step)s""",
    """INSERT INTO rollouts (training_id, group_pk, task_pk, rollout_id, task_id, seed, group_index, member_index,
        position, device_id, max_turns, status, num_turns, stop_reason, answer, error, success, reward, reward_parts,
        advantage, started_at, started_unix_s, duration_s, ended_at, num_prompt_tokens, num_cached_tokens,
        num_sampled_tokens, num_trained_tokens, sampling_s, device_s)
       SELECT r.training_id, copy.id, r.task_pk, md5(r.rollout_id || %(step)s), r.task_id, r.seed, r.group_index,
        r.member_index, r.position, r.device_id, r.max_turns, r.status, r.num_turns, r.stop_reason, r.answer, r.error,
        r.won, r.won::int, jsonb_build_object('success', r.won::int), r.won::int - %(success)s,
        r.started_at + %(later)s, r.started_unix_s + %(later_s)s, r.duration_s, r.ended_at + %(later)s,
        r.num_prompt_tokens, r.num_cached_tokens, r.num_sampled_tokens, r.num_sampled_tokens, r.sampling_s, r.device_s
       FROM (SELECT *, random() < %(success)s AS won FROM rollouts) r JOIN groups g ON g.id = r.group_pk
       JOIN steps s ON s.id = g.step_id JOIN groups copy ON copy.group_id = md5(g.group_id || %(step)s)
       WHERE s.training_id = %(run)s AND copy.training_id = %(run)s AND s.step = %(template)s""",
    """INSERT INTO turns (rollout_pk, turn_index, response_id, prompt_token_ids, prompt_chunks, sampled_tokens,
        sampling_logprobs, training_logprobs, policy_version, stop, text, failure_kind, failure_message,
        prompt_matches_renderer, request, cached_tokens, started_at, started_unix_s, duration_s, durations_s, action,
        action_error, before_sha256, after_sha256)
       SELECT copy.id, t.turn_index, 'resp_' || md5(t.response_id || %(step)s), t.prompt_token_ids, t.prompt_chunks,
        t.sampled_tokens, t.sampling_logprobs,
        ARRAY(SELECT p + 0.004 * (random() - 0.5) FROM unnest(t.sampling_logprobs) AS p),
        %(step)s - 1, t.stop, t.text, t.failure_kind, t.failure_message, t.prompt_matches_renderer,
        t.request, t.cached_tokens, t.started_at + %(later)s, t.started_unix_s + %(later_s)s, t.duration_s,
        t.durations_s, t.action, t.action_error, t.before_sha256, t.after_sha256
       FROM turns t JOIN rollouts r ON r.id = t.rollout_pk JOIN groups g ON g.id = r.group_pk
       JOIN steps s ON s.id = g.step_id JOIN rollouts copy ON copy.rollout_id = md5(r.rollout_id || %(step)s)
       WHERE s.training_id = %(run)s AND copy.training_id = %(run)s AND s.step = %(template)s""",
    """INSERT INTO rollout_images (rollout_pk, sha256)
       SELECT copy.id, i.sha256
       FROM rollout_images i JOIN rollouts r ON r.id = i.rollout_pk JOIN groups g ON g.id = r.group_pk
       JOIN steps s ON s.id = g.step_id JOIN rollouts copy ON copy.rollout_id = md5(r.rollout_id || %(step)s)
       WHERE s.training_id = %(run)s AND copy.training_id = %(run)s AND s.step = %(template)s""",
    """INSERT INTO validations (rollout_pk, query, expected, actual, success, duration_s)
       SELECT copy.id, v.query, v.expected, CASE WHEN copy.success THEN v.expected ELSE v.actual END, copy.success,
        v.duration_s
       FROM validations v JOIN rollouts r ON r.id = v.rollout_pk JOIN groups g ON g.id = r.group_pk
       JOIN steps s ON s.id = g.step_id JOIN rollouts copy ON copy.rollout_id = md5(r.rollout_id || %(step)s)
       WHERE s.training_id = %(run)s AND copy.training_id = %(run)s AND s.step = %(template)s""",
    """UPDATE groups SET num_successes = found.won, reward_mean = found.mean, reward_std = found.std
       FROM (SELECT r.group_pk, count(*) FILTER (WHERE r.success) AS won, avg(r.reward) AS mean,
             stddev_pop(r.reward) AS std FROM rollouts r JOIN groups g ON g.id = r.group_pk
             JOIN steps s ON s.id = g.step_id WHERE s.training_id = %(run)s AND s.step = %(step)s
             GROUP BY r.group_pk) found
       WHERE groups.id = found.group_pk""",
    """UPDATE rollouts SET (max_gap, max_log_ratio, min_logprob) = (
        SELECT max(abs(trained - sampled)), max(trained - sampled), min(sampled)
        FROM turns, unnest(training_logprobs, sampling_logprobs) AS token (trained, sampled)
        WHERE turns.rollout_pk = rollouts.id)
       WHERE group_pk IN (SELECT g.id FROM groups g JOIN steps s ON s.id = g.step_id
                          WHERE s.training_id = %(run)s AND s.step = %(step)s)""",
)


def copy_steps(url: str, training_id: int, num_steps: int) -> None:
    """Fill the run up to `num_steps` with copies of the recorded steps, as if they had been trained one by one."""
    rng = random.Random(training_id)
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as connection:
        for step in range(TEMPLATE_STEPS + 1, num_steps + 1):
            template = 1 + (step - 1) % TEMPLATE_STEPS
            metrics = step_metrics(step, num_steps, rng)
            later_s = 12.0 * (step - template)
            values = {
                "run": training_id,
                "step": step,
                "template": template,
                "metrics": Jsonb(metrics),
                "later": timedelta(seconds=later_s),
                "later_s": later_s,
                "success": metrics["reward/success_rate"],
            }
            for statement in _COPIES:
                connection.execute(statement, values)
        connection.execute(
            "UPDATE trainings SET num_completed_steps = %s WHERE id = %s", (max(num_steps, TEMPLATE_STEPS), training_id)
        )
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute("ANALYZE")


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("database_url")
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--name", default=f"seeded-{uuid4().hex[:6]}")
    parser.add_argument("--live", type=float, default=0.0, metavar="SECONDS", help="add new rollouts for a while")
    parser.add_argument("--turn-s", type=float, default=0.0, help="how long each turn of those takes")
    given = parser.parse_args()
    num_steps = max(TEMPLATE_STEPS, round(given.rollouts / (GROUPS * MEMBERS)))
    asyncio.run(_seed(given, num_steps))
    print(f"seeded {given.name}: {num_steps} steps of {GROUPS * MEMBERS} rollouts with {given.turns} turns", flush=True)
    return 0


async def _seed(given: argparse.Namespace, num_steps: int) -> None:
    await migrate(given.database_url)
    renderer = make_renderer(MODEL)
    policy = RandomTaps(renderer)
    async with DatabaseRecorder(given.database_url, image_token_id=renderer.image_token_id) as recorder:
        await recorder.record(begin(given.name, num_steps))
        await record_templates(recorder, policy, given.turns)
        await recorder.flush()
        await asyncio.to_thread(copy_steps, given.database_url, recorder.scope.require_training(), num_steps)
        if given.live:
            print("copied, going on", flush=True)
            policy.turn_s = given.turn_s
            await go_on(recorder, policy, first_step=num_steps + 1, turns=given.turns, live_s=given.live)
        else:
            await recorder.record(TrainingEnded(status="completed"))
        await recorder.flush()


if __name__ == "__main__":
    sys.exit(main())
