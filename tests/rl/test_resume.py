"""A resumed run must be the run that was never stopped: same tasks, same sampling seeds, same metrics."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from cua_rl.rl.curriculum import Memory, SuccessRates, SuccessRateStream, load_outcomes
from cua_rl.rl.stages import LoopParts
from cua_rl.rl.sync_loop import train
from cua_rl.rollout.run import RolloutJob
from cua_rl.tasks.task import Task
from cua_rl.training.config import LossConfig, OptimConfig
from cua_rl.types.rollout import Datum, Rollout, SamplingParams
from tests import builders
from tests.fakes import FakePolicy, FakeRecorder, FakeTrainer, make_task
from tests.rl.test_sync_loop import Log, settings

NUM_STEPS = 6


class Learner(FakeTrainer):
    """Its one weight is a digest of everything it was ever trained on."""

    weight = "untrained"

    async def forward_backward(self, datums: Sequence[Datum], loss: LossConfig, **weights: Any) -> Any:
        trained = [(datum.advantages, datum.model_input.chunks) for datum in datums]
        self.weight = sha256(f"{self.weight} {trained}".encode()).hexdigest()
        return await super().forward_backward(datums, loss, **weights)

    async def optim_step(self, optim: OptimConfig) -> Any:
        self.weight = sha256(f"{self.weight} {optim.learning_rate}".encode()).hexdigest()
        return await super().optim_step(optim)


class SeededRunner:
    """What a rollout does is a function of the weight, the task instance and the sampling seed, and of nothing else."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    async def run(self, plan: RolloutJob) -> Rollout:
        place = f"{self.learner.weight} {plan.task.task_id} {plan.task.seed} {plan.params.seed}"
        number = int.from_bytes(sha256(place.encode()).digest()[:4], "big")
        sampled = [number % 7, number % 11]
        prompt = builders.prompt(builders.text(1, 2))
        turn = builders.model_turn(prompt, sampled, [-0.1, -0.2], policy_version=self.learner.policy_version)
        return builders.rollout(turn, reward=float(number % 2), rollout_id=f"{number}", member_index=plan.member_index)


class Template:
    def __init__(self, task_id: str) -> None:
        self.task_id = task_id

    def make_task(self, seed: int) -> Task:
        return make_task(self.task_id, seed)


async def run(folder: Path, learner: Learner, num_done: int, last_step: int) -> dict[int, Mapping[str, float]]:
    """Steps of the run whose outcomes are in `folder`; the task stream follows recorded success."""
    rates = SuccessRates()
    rates.observe(load_outcomes(folder / "outcomes.jsonl", num_done))
    templates = [Template(name) for name in "abc"]
    log = Log()
    parts = LoopParts(
        tasks=SuccessRateStream(templates=templates, seed=5, instance_seeds=range(1000), rates=rates),
        runner=SeededRunner(learner),
        trainer=learner,
        policy=FakePolicy(),
        evaluator=None,
        recorder=FakeRecorder(),
        log=log,
        memory=Memory(rates=rates, outcomes_path=folder / "outcomes.jsonl"),
    )
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    chosen = settings(
        first_step=num_done + 1, max_steps=NUM_STEPS, groups_per_batch=3, group_size=4, params=params, save_every=0
    )

    class Stopped(Exception):
        pass

    def stop_at(step: int, metrics: Mapping[str, float]) -> None:
        Log.log_step(log, step, metrics)
        if step == last_step < NUM_STEPS:
            raise Stopped

    log.log_step = stop_at  # type: ignore[method-assign]
    with suppress(Stopped):
        await train(chosen, parts)
    return {step: {k: v for k, v in metrics.items() if not k.startswith("time/")} for step, metrics in log.steps}


async def test_metrics_after_a_resume_equal_those_of_a_run_that_was_never_stopped(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = await run(tmp_path / "whole", Learner(), 0, NUM_STEPS)

    learner = Learner()
    first = await run(tmp_path / "cut", learner, 0, 3)
    checkpoint = (learner.weight, learner.policy_version)
    lost = await run(tmp_path / "cut", learner, 3, 5)  # two more steps that no checkpoint has, then death
    resumed = Learner()
    resumed.weight, resumed.policy_version = checkpoint
    second = await run(tmp_path / "cut", resumed, 3, NUM_STEPS)

    # what tasks and sampling seeds of this run's seeds give: nobody may renumber them unnoticed
    assert [round(12 * metrics["reward/mean"]) for metrics in whole.values()] == [6, 9, 5, 5, 6, 6]
    assert first | second == whole
    assert lost == {step: whole[step] for step in (4, 5)}
    assert (tmp_path / "cut" / "outcomes.jsonl").read_text() == (tmp_path / "whole" / "outcomes.jsonl").read_text()
