"""A real training step whose only reward is a judge's verdict, on tasks that are descriptions alone."""

import asyncio
import json
from hashlib import sha256
from pathlib import Path

import pytest

from cua_rl.recipes.rebuild_datums import RebuildConfig, cli_main
from cua_rl.sampling.server import VllmServer
from tests.doubles.judge_endpoint import KEY, MODEL, Asked, JudgeEndpoint, serve_judge, verdict
from tests.real.end_to_end.runs import Run
from tests.real.end_to_end.test_demo_run import recorded_groups

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

TASKS = json.dumps({"source_type": "custom", "custom_tasks": ["Open Mail.", "Open Clock.", "Open Settings."]})


def decide(asked: Asked) -> str:
    """Half of all attempts succeed, by what was done."""
    digest = sha256(json.dumps(asked.record["turns"]).encode()).digest()
    return verdict(digest[0] % 2 == 0, "by what was done")


async def test_a_step_is_trained_on_verdicts_and_each_is_in_the_database(
    server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    endpoint = JudgeEndpoint(decide, statuses=[0, 503, 0, 429])
    async with serve_judge(endpoint) as base_url:
        judge = (f"judge_base_url={base_url}", f"judge_model={MODEL}", "judge_votes=3", "reward=judge")
        prices = ("judge_input_price=1", "judge_output_price=5")
        tasks = (f"tasks={TASKS}", "eval_tasks=none", "max_steps=1", f"base_url={server.base_url}")
        run = Run(tmp_path / "run", *judge, *prices, *tasks)
        status = await asyncio.to_thread(run.finish)

    assert status == 0, run.output()
    assert "recipes.calibrate_judge" in (run.folder / "logs" / "run.log").read_text() + run.output()
    ((group_of_step),) = await recorded_groups(run.folder, 1)
    rollouts = [rollout for group in group_of_step for rollout in group.rollouts]
    assert len(rollouts) == 16
    for rollout in rollouts:
        judgement = rollout.judgement
        assert judgement is not None
        assert rollout.reward is not None
        assert rollout.validation is not None
        assert rollout.reward.total == float(judgement.success is True)
        assert (judgement.decides, len(judgement.votes), judgement.agreement) == (True, 3, 1.0)
        assert rollout.validation.query == f"judge {MODEL}"
    successes = sum(rollout.success for rollout in rollouts)
    assert 0 < successes < 16
    (step,) = run.steps()
    assert step["reward/mean"] == step["judge/success_rate"] == successes / 16
    assert (step["judge/num_verdicts"], step["judge/num_without_verdict"]) == (16, 0)
    assert step["judge/cost_usd"] == pytest.approx(48 * (1000 * 1 + 40 * 5) / 1e6)
    assert step["optim/grad_norm"] > 0
    assert step["policy/parity_mean_abs"] <= 0.005
    assert {asked.record["task"] for asked in endpoint.asked} == {"Open Mail.", "Open Clock.", "Open Settings."}
    assert KEY not in (run.folder / "config.json").read_text()
    await cli_main(RebuildConfig(run=run.folder))
