"""How workers of a run start, and what a run refuses before it starts any."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cua_rl.cluster import ClusterLost
from cua_rl.environments.table import ENVIRONMENTS
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.run.prepared_training import check_workers
from cua_rl.run.rollout_config import GatewaySettings
from cua_rl.run.training_config import CLIConfig
from cua_rl.task_loader import load_tasks
from cua_rl.types.errors import ConfigError, CuaError, DatabaseError
from cua_rl.workers.fleet import End, Fleet
from cua_rl.workers.launch import keep_alive
from cua_rl.workers.worker import identify
from tests.fakes import FakeRecorder
from tests.jumping_time import run_jumping
from tests.workers.test_workers import FakeAdapters, plan

PHONES = ENVIRONMENTS["simulator"]


@pytest.mark.parametrize("gateway", [GatewaySettings(port=8100), GatewaySettings(public_url="http://trainer:8100")])
def test_an_address_of_a_gateway_that_only_one_worker_could_have_is_refused(gateway: GatewaySettings) -> None:
    check_workers(CLIConfig(gateway=gateway), PHONES, {})
    with pytest.raises(ConfigError, match="gateway: expected no port or public_url with rollout workers"):
        check_workers(CLIConfig(gateway=gateway, rollout_workers=2), PHONES, {})
    check_workers(CLIConfig(gateway=GatewaySettings(host="0.0.0.0"), rollout_workers=2), PHONES, {})


@pytest.mark.parametrize("mode", [{}, {"RAY_AUTH_MODE": "disabled"}])
def test_workers_are_not_started_on_a_cluster_that_anybody_can_use(mode: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="rollout_workers: expected a Ray cluster that requires a token"):
        check_workers(CLIConfig(rollout_workers=2), PHONES, {"RAY_ADDRESS": "10.0.0.1:6379", **mode})
    check_workers(CLIConfig(rollout_workers=2), PHONES, mode)  # its own cluster has a token


def make_fleet(*names: str) -> Fleet:
    return Fleet(FakeAdapters(), FakeRecorder(), names)


@pytest.mark.parametrize(
    ("error", "num_starts", "said"),
    [
        (ConfigError("expected the run's code on host-7"), 1, "expected the run's code on host-7"),
        (ClusterLost("this machine's node has ended"), 1, "this machine's node has ended"),
        (
            DatabaseError("expected a Postgres server"),
            6,
            "it ended 6 times, at last because expected a Postgres server",
        ),
        (
            AssertionError("a bug"),
            6,
            "because cannot start rollout worker worker-1: AssertionError: a bug; read its log",
        ),
    ],
)
def test_a_worker_that_cannot_be_started_is_left_out_at_once_if_that_will_not_change(
    error: Exception, num_starts: int, said: str
) -> None:
    fleet, started = make_fleet("worker-1"), list[int]()

    async def attempt() -> End:
        started.append(1)
        raise error

    async def run() -> None:
        await keep_alive(fleet, "worker-1", attempt)
        with pytest.raises(CuaError, match="no rollout worker is left") as raised:
            await fleet.run(plan())
        assert said in str(raised.value)

    run_jumping(run())
    assert len(started) == num_starts


def started_at(*ends: End) -> list[float]:
    """When each attempt began, in a time that jumps; the last end repeats."""
    started: list[float] = []

    async def attempt() -> End:
        started.append(asyncio.get_running_loop().time())
        return ends[min(len(started), len(ends)) - 1]

    run_jumping(keep_alive(make_fleet("worker-1"), "worker-1", attempt))
    return started


def test_a_worker_that_ends_again_and_again_gets_half_a_minute_for_what_it_needs() -> None:
    started = started_at(End(why="its process ended"))

    assert [round(later - earlier) for earlier, later in pairwise(started)] == [0, 2, 4, 8, 16]


def test_a_worker_that_has_worked_may_be_started_again_as_often_as_it_dies() -> None:
    worked, in_vain = End(why="its node was taken away", has_worked=True), End(why="its process ended")
    started = started_at(in_vain, in_vain, in_vain, worked, in_vain)

    assert [round(later - earlier) for earlier, later in pairwise(started)] == [0, 2, 4, 0, 0, 2, 4, 8, 16]


def test_a_worker_with_broken_devices_rests_before_it_is_tried_again() -> None:
    started = started_at(End(why="its devices fail", is_lost=False, rest_s=60.0))

    assert [round(later - earlier) for earlier, later in pairwise(started)] == [60, 62, 64, 68, 76]


def test_members_of_a_run_are_told_apart_by_code_tasks_model_and_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, reward, model = tmp_path / "tasks.json", tmp_path / "my_reward.py", tmp_path / "model"
    tasks.write_text("[1]")
    reward.write_text("def score(evidence): return 1.0")
    model.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (model / file).write_bytes((TINY_QWEN3_VL / file).read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    task_set = load_tasks({"source_type": "demo_training"}, seed=0, split="train")
    config = CLIConfig(tasks={"source_type": "custom_json", "file_path": str(tasks)}, reward="my_reward:score")

    def changed_by(path: Path, content: str) -> list[str]:
        before = identify(config, model, task_set)
        path.write_text(content)
        after = identify(config, model, task_set)
        return [part for part in before if before[part] != after[part]]

    assert changed_by(tasks, "[2]") == ["task files"]
    assert changed_by(reward, "def score(evidence): return 0.0") == ["reward function"]
    assert changed_by(model / "tokenizer.json", "{}") == ["model"]
    assert changed_by(model / "model.safetensors", "weights, which workers do not need") == []
    fewer = replace(task_set, templates=task_set.templates[1:])
    own, others = (identify(config, model, each) for each in (task_set, fewer))
    assert [part for part in own if own[part] != others[part]] == ["task files"]
