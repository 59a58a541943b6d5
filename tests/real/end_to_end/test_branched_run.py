"""A real run whose rollouts fork: its training data, and its steps, come back from the record to the last bit."""

import json
from pathlib import Path

import pytest

from cua_rl.command_line.recipe import run_recipe
from cua_rl.recipes.export_trajectories import main as export_trajectories
from cua_rl.recipes.import_trajectories import main as import_trajectories
from cua_rl.recipes.rebuild_datums import RebuildConfig, cli_main
from cua_rl.recipes.replay_step import ReplayConfig
from cua_rl.recipes.replay_step import cli_main as replay
from cua_rl.sampling.server import VllmServer
from tests.real.end_to_end.runs import Run

pytestmark = pytest.mark.timeout(900)

TASKS = json.dumps({"source_type": "demo_training", "tags": ["demo"], "limit": 4})
OPTIONS = (
    *("max_steps=2", "groups_per_batch=3", "group_size=8", "eval_tasks=none", f"tasks={TASKS}", "max_turns=5"),
    *("advantages=leave_one_out", "branching.num_siblings=2", "reward=efficiency", "sampling.seed=1"),
)


def test_a_branched_run_is_rebuilt_and_replayed_to_its_last_bit(server: VllmServer, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *OPTIONS, f"base_url={server.base_url}")

    assert run.finish() == 0, run.output()

    steps = run.steps()
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record["rollout/shared_turns"] > 0
        assert record["rollout/num_datums"] > 0
        assert record["rollout/prompt_mismatches"] == record["rollout/retokenised_tokens"] == 0
        assert record["policy/parity_mean_abs"] <= 0.005
    assert run_recipe(RebuildConfig, cli_main, [f"run={run.folder}"]) == 0
    for step in (1, 2):
        assert run_recipe(ReplayConfig, replay, [f"log_path={run.folder}", f"step={step}"]) == 0
        found = json.loads((run.folder / "replays" / f"{step:06d}.json").read_text())
        assert (found["logprob_gap"], found["start"]) == (0.0, step - 1)
        assert all(found[kind]["is_equal"] for kind in ("adapter", "optimizer"))

    pytest.importorskip("pyarrow", reason="`make setup` installs pyarrow")
    files, again = tmp_path / "files", tmp_path / "again"
    assert export_trajectories([f"run={run.folder}", f"out={files}"]) == 0
    assert import_trajectories([f"path={files}", f"log_path={again}"]) == 0
    assert run_recipe(RebuildConfig, cli_main, [f"run={again}"]) == 0
