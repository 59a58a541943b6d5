"""The loop with a curriculum: refilled batches, tasks drawn by success rate, replayed successes, resumed runs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cua_rl.agent.agent import AgentOutcome
from cua_rl.events import GroupEnded, SourceStarted, StepTrained
from cua_rl.rl.curriculum import (
    Memory,
    ReplayBuffer,
    SuccessRates,
    SuccessRateStream,
    load_outcomes,
    newest_success_ids,
)
from cua_rl.rl.stages import LoopParts
from cua_rl.rl.sync_loop import train
from cua_rl.tasks.task import Task
from cua_rl.types.errors import ParityError
from cua_rl.types.rollout import AgentTurn, StopReason
from tests.builders import model_turn, prompt, text
from tests.fakes import FakeTrainer
from tests.rl.test_curriculum import FakeTemplate
from tests.rl.test_sync_loop import Log, parts, settings
from tests.rollout.test_run import Bench

TASK_IDS = ("solved", "open", "hopeless")


class Killed(Exception):
    """The end of a process, as far as a test can have it."""


class TalentedAgent:
    """Always solves "solved", never "hopeless", and every second try of each instance of "open"; killed after
    `num_rollouts_to_live`.
    """

    def __init__(self, num_rollouts_to_live: int | None = None) -> None:
        self.num_rollouts_to_live = num_rollouts_to_live
        self.hopes: dict[str, str] = {"solved": "1", "hopeless": "0"}
        self._tries: Counter[str] = Counter()

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        if self._tries.total() == self.num_rollouts_to_live:
            raise Killed
        self._tries[task.instruction] += 1
        response_id = f"resp-{self._tries.total()}"
        access.openai_client(task.rollout_id).append(model_turn(prompt(text(1, 2)), response_id=response_id))
        await on_turn(
            AgentTurn(
                response_id=response_id,
                before=await device.observe(),
                durations_s={"respond": 0.1},
            )
        )
        device.state = self.hopes.get(task.instruction.split()[0], str(self._tries[task.instruction] % 2))
        return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=1, answer="done")


class NamedTemplate(FakeTemplate):
    def make_task(self, seed: int) -> Task:
        return replace(super().make_task(seed), instruction=f"{self.task_id} {seed}")


class RoundRobin:
    """Solved, open, hopeless, and again, with a seed of their own each."""

    def batch(self, number: int, num_tasks: int) -> list[Task]:
        positions = range(number * num_tasks, (number + 1) * num_tasks)
        return [NamedTemplate(task_id=TASK_IDS[position % 3]).make_task(position) for position in positions]


def loop_parts(
    agent: TalentedAgent, memory: Memory | None = None, tasks: Any = None, trainer: FakeTrainer | None = None
) -> tuple[LoopParts, Bench, Log]:
    made, bench, log, _ = parts(agent, trainer)  # type: ignore[arg-type]
    return replace(made, tasks=tasks or RoundRobin(), evaluator=None, memory=memory or Memory()), bench, log


def stream(rates: SuccessRates) -> SuccessRateStream:
    templates = [NamedTemplate(task_id=task_id) for task_id in TASK_IDS]
    return SuccessRateStream(templates=templates, seed=0, instance_seeds=range(10**6), rates=rates)


def remembering(folder: Path, num_steps: int = 0) -> Memory:
    """What a run in `folder` remembers after so many steps, as a resumed run loads it."""
    memory = Memory(rates=SuccessRates(), outcomes_path=folder / "outcomes.jsonl")
    assert memory.rates is not None
    memory.rates.observe(load_outcomes(folder / "outcomes.jsonl", num_steps))
    return memory


def tasks_seen(bench: Bench) -> dict[int, list[tuple[str, int]]]:
    """Task and seed of every group that a step ran, in order."""
    seen: dict[int, list[tuple[int, str, int]]] = {}
    for event in bench.recorder.events:
        if isinstance(event, GroupEnded):
            seen.setdefault(event.source.step, []).append((event.group.index, event.group.task_id, event.group.seed))
    return {step: [entry[1:] for entry in sorted(groups)] for step, groups in seen.items()}


async def test_refilling_keeps_the_batch_full_of_groups_that_teach() -> None:
    trainer = FakeTrainer()
    loop, bench, log = loop_parts(TalentedAgent(), trainer=trainer)

    await train(settings(max_steps=1, max_refill_factor=4), loop)

    # round robin: the 2nd and the 5th group teach
    assert trainer.calls == ["forward_backward 4", "optim_step"]
    metrics = log.steps[0][1]
    assert metrics["curriculum/num_sampled_groups"] == 5.0
    assert metrics["curriculum/num_dropped_groups"] == 3.0
    assert metrics["curriculum/effective_group_frac"] == pytest.approx(0.4)
    assert metrics["curriculum/batch_fill_frac"] == 1.0
    assert metrics["rollout/num_rollouts"] == 10.0
    (started,) = [event for event in bench.recorder.events if isinstance(event, SourceStarted)]
    assert [task.task_id for task in started.tasks] == ["solved", "open"]
    replaced = [e.replaced_by.seed for e in bench.recorder.events if isinstance(e, GroupEnded) and e.replaced_by]
    assert replaced == [2, 3, 4]


async def test_without_refilling_the_batch_shrinks() -> None:
    trainer = FakeTrainer()
    loop, _, log = loop_parts(TalentedAgent(), trainer=trainer)

    await train(settings(max_steps=1), loop)

    assert trainer.calls == ["forward_backward 2", "optim_step"]
    assert log.steps[0][1]["curriculum/batch_fill_frac"] == 0.5
    assert log.steps[0][1]["replay/num_rollouts"] == 0.0


async def test_a_run_killed_and_resumed_draws_the_tasks_of_one_that_was_not(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    run = settings(max_steps=6, groups_per_batch=4, max_refill_factor=2)

    async def attempt(folder: Path, num_done: int, num_rollouts_to_live: int | None) -> dict[int, Any]:
        memory = remembering(folder, num_done)
        assert memory.rates is not None
        agent = TalentedAgent(num_rollouts_to_live)
        loop, bench, _ = loop_parts(agent, memory, stream(memory.rates))
        try:
            await train(replace(run, first_step=num_done + 1), loop)
        except* Killed:
            pass
        return tasks_seen(bench)

    expected = await attempt(whole, 0, None)
    begun = await attempt(halves, 0, 56)
    resumed = await attempt(halves, 2, None)  # from an older checkpoint than the last complete step

    assert 3 < max(begun) < 6
    assert {step: resumed[step] for step in range(3, 7)} == {step: expected[step] for step in range(3, 7)}
    assert (halves / "outcomes.jsonl").read_text().count("\n") == 6
    untrained = Memory(rates=SuccessRates())
    assert untrained.rates is not None
    assert [(t.task_id, t.seed) for t in stream(untrained.rates).batch(5, 8)] != expected[6]


async def test_running_success_rates_show_in_the_metrics(tmp_path: Path) -> None:
    memory = remembering(tmp_path)
    assert memory.rates is not None
    loop, _, log = loop_parts(TalentedAgent(), memory, stream(memory.rates))

    await train(settings(max_steps=6, groups_per_batch=4), loop)

    metrics = log.steps[-1][1]
    assert metrics["curriculum/success_rate/solved"] > 0.75
    assert metrics["curriculum/success_rate/hopeless"] < 0.25
    assert 0.4 < metrics["curriculum/success_rate/open"] < 0.6


async def losing_run(tmp_path: Path, trainer: FakeTrainer, *, parity_limit: float = 0.05) -> tuple[Bench, Log]:
    """Step 1 solves its only task; from then on every rollout fails."""
    memory = Memory(replay=ReplayBuffer(capacity_per_task=1), outcomes_path=tmp_path / "outcomes.jsonl")
    agent = TalentedAgent()

    class Losing:
        def batch(self, number: int, num_tasks: int) -> list[Task]:
            if number:
                agent.hopes["solved"] = "0"
            return [NamedTemplate(task_id="solved").make_task(number)]

    loop, bench, log = loop_parts(agent, memory, Losing(), trainer)
    await train(settings(max_steps=2, groups_per_batch=1, parity_limit=parity_limit), loop)
    return bench, log


async def test_a_stored_success_is_trained_on_where_a_whole_group_fails(tmp_path: Path) -> None:
    trainer = FakeTrainer()

    bench, log = await losing_run(tmp_path, trainer)

    assert trainer.calls == ["forward_backward 3", "optim_step"]  # two failures and the success of step 1
    assert log.steps[0][1]["replay/num_stored"] == 1.0
    assert log.steps[1][1]["replay/num_rollouts"] == 1.0
    assert log.steps[1][1]["reward/mean"] == 0.0  # the replayed success is not this step's
    assert log.steps[1][1]["rollout/num_rollouts"] == 2.0
    ended = [event for event in bench.recorder.events if isinstance(event, GroupEnded)]
    success = ended[0].group.rollouts[0]
    assert ended[1].group.replayed == (success,)
    assert ended[1].advantages == pytest.approx((-1 / 3, -1 / 3, 2 / 3))
    trained = [event for event in bench.recorder.events if isinstance(event, StepTrained)][1]
    assert trained.num_datums == 3
    assert set(trained.training_logprobs) == {rollout.rollout_id for rollout in ended[1].group.rollouts}
    outcomes = load_outcomes(tmp_path / "outcomes.jsonl", 2)
    assert newest_success_ids(outcomes, 1) == [success.rollout_id]


class Drifted(FakeTrainer):
    """Agrees with the sampler on datums of the current step, and has moved by `drift` nats since older ones."""

    def __init__(self, drift: float) -> None:
        super().__init__()
        self.drift = drift

    def _rows(self, datums: Any) -> Any:
        rows = super()._rows(datums)
        *fresh, last = rows
        return (*fresh, tuple(value + self.drift if value else 0.0 for value in last))


async def test_parity_is_measured_on_policy_and_the_drift_of_replayed_tokens_apart(tmp_path: Path) -> None:
    _, log = await losing_run(tmp_path, Drifted(-0.4), parity_limit=0.01)

    metrics = log.steps[1][1]
    assert metrics["policy/parity_mean_abs"] == 0.0
    assert metrics["replay/log_ratio/mean"] == pytest.approx(0.4)


async def test_disagreement_on_fresh_tokens_still_stops_a_run_that_replays(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="step 2"):
        await losing_run(tmp_path, FakeTrainer(gap=0.3))
