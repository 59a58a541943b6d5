"""Refilled batches, tasks by success rate and replayed successes in a real run that is killed and goes on."""

import json
import signal
from pathlib import Path

import pytest

from cua_rl.command_line.recipe import run_recipe
from cua_rl.recipes.rebuild_datums import RebuildConfig, cli_main
from cua_rl.sampling.server import VllmServer
from tests.real.end_to_end.runs import Run, read_lines, survivors

pytestmark = pytest.mark.timeout(900)

TASKS = json.dumps({"source_type": "demo_training", "tags": ["demo", "open_app"], "limit": 4})
OPTIONS = (
    *("max_steps=3", "groups_per_batch=6", "group_size=2", "eval_tasks=none", f"tasks={TASKS}"),
    *("refill_groups=true", "max_refill_factor=2", "task_sampling=success_rate", "replay_successes=true", "loss=ppo"),
)


def test_a_killed_run_with_a_curriculum_resumes_and_its_datums_are_rebuilt_from_the_database(
    server: VllmServer, tmp_path: Path
) -> None:
    options = (*OPTIONS, f"base_url={server.base_url}")
    first = Run(tmp_path / "run", *options)
    first.wait_for(lambda: len(first.steps()) == 2)
    owned = first.owned()
    first.signal(signal.SIGKILL)
    first.finish()
    assert survivors(owned) == []

    resumed = Run(tmp_path / "run", *options, "behavior_if_log_dir_exists=resume")

    assert resumed.finish() == 0, resumed.output()
    steps = resumed.steps()
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert [record["step"] for record in read_lines(resumed.folder / "outcomes.jsonl")] == [1, 2, 3]
    for record in steps:
        num_sampled, num_dropped = record["curriculum/num_sampled_groups"], record["curriculum/num_dropped_groups"]
        assert num_sampled == 12 or num_sampled - num_dropped == 6
        assert record["rollout/num_rollouts"] == 2 * num_sampled
        assert record["policy/parity_mean_abs"] <= 0.005
        assert record["rollout/retokenised_tokens"] == 0
    assert any(name.startswith("curriculum/success_rate/") for name in steps[-1])
    assert sum(record["replay/num_rollouts"] for record in steps[1:]) > 0
    assert run_recipe(RebuildConfig, cli_main, [f"run={resumed.folder}"]) == 0
