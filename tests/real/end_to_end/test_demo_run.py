"""The whole system: tiny model, simulated phone, real vLLM, real trainer, real Postgres."""

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.queries import find_training
from cua_rl.database.rebuild import load_groups
from cua_rl.database.session import open_sessions
from cua_rl.recipes.rebuild_datums import RebuildConfig, cli_main
from cua_rl.recipes.replay_step import ReplayConfig
from cua_rl.recipes.replay_step import cli_main as replay
from cua_rl.sampling.server import VllmServer
from cua_rl.task_loader import load_tasks
from cua_rl.types.rollout import RolloutGroup
from tests.live_processes import command_line
from tests.real.end_to_end.runs import Run, survivors

pytestmark = pytest.mark.timeout(900)


async def recorded_groups(folder: Path, num_steps: int) -> list[list[RolloutGroup]]:
    """The groups of every step, from the run's own database."""
    async with (
        EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log") as server,
        open_sessions(server.url) as sessions,
        sessions() as session,
    ):
        training = await find_training(session, folder.name, str(folder))
        assert training is not None
        return [await load_groups(session, training.id, step) for step in range(1, num_steps + 1)]


def expected_tasks(num_steps: int) -> list[list[tuple[str, int]]]:
    """What an uninterrupted run trains on."""
    tasks = load_tasks({"source_type": "demo_training", "tags": ["demo"]}, seed=0, split="train")
    return [[(task.task_id, task.seed) for task in tasks.batch(number, 4)] for number in range(num_steps)]


def test_a_run_survives_the_death_of_its_model_server_and_every_figure_holds(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "max_steps=3")
    run.wait_for(lambda: len(run.steps()) == 1)
    owned = run.owned()

    server = model_server(owned)
    assert server is not None
    server.kill()

    assert run.finish() == 0, run.output()
    assert survivors(owned) == []
    steps = run.steps()
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["rollout/num_rollouts"] == 16
        assert record["rollout/prompt_mismatches"] == 0
        assert record["rollout/retokenised_tokens"] == 0
        assert record.get("policy/parity_mean_abs", 0.0) <= 0.005
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["num_steps"] == 3
    assert summary["num_eval_rollouts"] == 8
    assert {"baseline_success_rate", "final_success_rate", "setup_time_s", "train_time_s"} <= set(summary)
    assert (run.folder / "reward.png").stat().st_size > 10_000
    groups = asyncio.run(recorded_groups(run.folder, 3))
    assert [[(group.task_id, group.seed) for group in step] for step in groups] == expected_tasks(3)
    responses = Counter(
        turn.model.response_id
        for step in groups
        for group in step
        for rollout in group.rollouts
        for turn in rollout.turns
    )
    assert max(responses.values()) == 1
    moved = run.folder.rename(tmp_path / "moved")
    assert run_recipe(RebuildConfig, cli_main, [f"run={moved}"]) == 0
    assert_a_step_can_be_made_again(moved, 2)


def assert_a_step_can_be_made_again(folder: Path, step: int) -> None:
    """To the last bit, and in other ways, by the command."""
    others = '[{"loss": "ppo"}, {"learning_rate": 0}]'
    assert run_recipe(ReplayConfig, replay, [f"log_path={folder}", f"step={step}", f"what_if={others}"]) == 0
    found = json.loads((folder / "replays" / f"{step:06d}.json").read_text())
    assert (found["logprob_gap"], found["start"], found["replayed_on"]) == (0.0, step - 1, found["trained_on"])
    assert all(found[kind]["is_equal"] for kind in ("adapter", "optimizer"))
    assert [variant["norm"] > 0 for variant in found["variants"]] == [True, True, False]
    assert (folder / "replays" / f"{step:06d}.png").stat().st_size > 10_000


def test_a_killed_run_resumes_where_its_checkpoint_was_and_leaves_no_orphans(
    server: VllmServer, tmp_path: Path
) -> None:
    options = ("max_steps=3", "eval_tasks=none", f"base_url={server.base_url}")
    first = Run(tmp_path / "run", *options)
    first.wait_for(lambda: len(first.steps()) == 2)
    owned = first.owned()

    first.signal(signal.SIGKILL)

    first.finish()
    assert survivors(owned) == []
    resumed = Run(tmp_path / "run", *options, "behavior_if_log_dir_exists=resume")
    assert resumed.finish() == 0, resumed.output()
    assert [record["step"] for record in resumed.steps()] == [1, 2, 3]
    groups = asyncio.run(recorded_groups(resumed.folder, 3))
    assert [[(group.task_id, group.seed) for group in step] for step in groups] == expected_tasks(3)
    assert [[len(group.rollouts) for group in step] for step in groups] == [[4] * 4] * 3


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_stopping_a_run_ends_everything_it_owns(number: signal.Signals, status: int, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "max_steps=3")
    run.wait_for(lambda: model_server(run.owned()))
    owned = run.owned()

    run.signal(number)

    assert run.finish() == status, run.output()
    assert survivors(owned) == []
    says_how = "there is no checkpoint yet; continue with\n" in run.output()
    assert says_how == (number == signal.SIGINT)
    if says_how:
        assert f"cua_rl.recipes.train log_path={run.folder} behavior_if_log_dir_exists=resume\n" in run.output()


def model_server(processes: list[psutil.Process]) -> psutil.Process | None:
    """The server itself, not the guard that runs it."""
    for process in processes:
        words = command_line(process)
        if "cua_rl.vllm_cpu_server" in words and not any("process_guard" in word for word in words):
            return process
    return None
