from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cua_rl.evaluation.evaluate import Evaluator
from cua_rl.events import CheckpointSaved, EvaluationEnded, GroupEnded, SourceStarted, StepTrained
from cua_rl.metrics import check_names
from cua_rl.reporting.comparison import EvalResult
from cua_rl.rl.advantages import score_group
from cua_rl.rl.config import CurriculumSettings, EvaluationSettings, LoopConfig, SamplingSettings
from cua_rl.rl.stages import LoopParts, LoopSettings, build_step_batch, is_checkpoint_due
from cua_rl.rl.sync_loop import train
from cua_rl.tasks.task import Task
from cua_rl.training.config import CheckpointSettings, LossConfig, TrainerConfig
from cua_rl.types.errors import ParityError
from cua_rl.types.rollout import SamplingParams
from tests.builders import IMAGE_TOKEN, group, model_turn, prompt, rollout, text
from tests.fakes import FakeAgent, FakePolicy, FakeTrainer, make_task
from tests.rollout.test_run import Bench

PARAMS = SamplingParams(max_tokens=8, temperature=1.0)


class Seeds:
    def batch(self, number: int, num_tasks: int) -> list[Task]:
        return [make_task(seed=100 * number + index) for index in range(num_tasks)]


class Log:
    def __init__(self) -> None:
        self.steps: list[tuple[int, Mapping[str, float]]] = []
        self.evaluations: list[tuple[str, int]] = []
        self.groups: list[tuple[int, list[float]]] = []

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        check_names(metrics)
        self.steps.append((step, metrics))

    def log_group(self, index: int, rewards: Sequence[float]) -> None:
        self.groups.append((index, list(rewards)))

    def log_evaluation(self, phase: str, step: int, result: EvalResult) -> None:
        check_names(result.metrics("held_out"))
        self.evaluations.append((phase, step))


START = ("params", "image_token_id", "first_step", "num_tasks", "begins_curve", "owed_evaluations", "kept_groups")


def settings(**changes: Any) -> LoopSettings:
    """A short loop with other values of the configuration, or another `START`."""
    start: dict[str, Any] = {"params": PARAMS, "image_token_id": IMAGE_TOKEN}
    start |= {name: changes.pop(name) for name in START if name in changes}
    values: dict[str, Any] = {
        "max_steps": 2,
        "groups_per_batch": 2,
        "group_size": 2,
        "trainer": TrainerConfig(parity_limit=changes.pop("parity_limit", 0.05)),
        "sampling": SamplingSettings(min_group_size=1),
        "eval_every": 0,
        "save_every": 1,
        "num_groups_to_log": 0,
    }
    if factor := changes.pop("max_refill_factor", None):
        values["curriculum"] = CurriculumSettings(refill_groups=True, max_refill_factor=factor)
    return LoopSettings(config=LoopConfig(**values | changes), **start)


def parts(agent: FakeAgent, trainer: FakeTrainer | None = None) -> tuple[LoopParts, Bench, Log, FakePolicy]:
    bench, log, policy = Bench(agent), Log(), FakePolicy()
    evaluator = Evaluator(tasks=[make_task(seed=9)], runner=bench.runner, params=PARAMS, recorder=bench.recorder)
    made = LoopParts(
        tasks=Seeds(),
        runner=bench.runner,
        trainer=trainer or FakeTrainer(),
        policy=policy,
        evaluator=evaluator,
        recorder=bench.recorder,
        log=log,
    )
    return made, bench, log, policy


async def test_every_step_trains_publishes_and_the_ends_are_evaluated() -> None:
    trainer = FakeTrainer()
    loop, bench, log, policy = parts(FakeAgent(["1", "0"]), trainer)

    await train(settings(), loop)

    assert trainer.calls == ["forward_backward 4", "optim_step"] * 2
    assert policy.published == [0, 1, 2]
    assert policy.saved == [1, 2]
    assert log.evaluations == [("baseline", 0), ("eval", 2)]
    kinds = [type(event) for event in bench.recorder.events]
    assert [
        kinds.count(kind) for kind in (SourceStarted, GroupEnded, StepTrained, EvaluationEnded, CheckpointSaved)
    ] == [
        4,
        6,
        2,
        2,
        2,
    ]


@pytest.mark.parametrize(("outlier", "warns"), [(-1e6, True), (101.6, True), (-1.0, False)])
async def test_a_reward_far_from_all_others_is_a_warning_that_names_its_rollout(
    caplog: pytest.LogCaptureFixture, outlier: float, warns: bool
) -> None:
    rewards = [0.0, 1.0] * 8
    rollouts = [
        rollout(model_turn(prompt(text(1, 2))), reward=reward, rollout_id=str(i)) for i, reward in enumerate(rewards)
    ]
    rollouts[5] = rollout(model_turn(prompt(text(1, 2))), reward=outlier, rollout_id="far")

    await build_step_batch(settings(), [score_group(group(*rollouts), "mean")])

    assert ("rollout_id=far" in caplog.text) is warns
    assert ("reward_clip" in caplog.text) is warns


class _WritesAgain(FakeTrainer):
    """Calls something of its own by the name of a metric of rollouts."""

    async def trainer_metrics(self) -> dict[str, float]:
        return {"policy/entropy_estimate": 0.057}


async def test_a_metric_that_two_parts_of_a_step_write_ends_the_run() -> None:
    loop, *_ = parts(FakeAgent(["1", "0"]), _WritesAgain())

    with pytest.raises(ValueError, match="policy/entropy_estimate"):
        await train(settings(), loop)


async def test_the_baseline_may_be_left_out() -> None:
    loop, _, log, _ = parts(FakeAgent(["1", "0"]))

    await train(settings(evaluation=EvaluationSettings(skip_baseline=True)), loop)

    assert log.evaluations == [("eval", 2)]


async def test_so_many_groups_of_each_step_are_shown_with_their_rewards() -> None:
    loop, _, log, _ = parts(FakeAgent(["1", "0"]))

    await train(settings(num_groups_to_log=1), loop)

    assert [(index, sorted(rewards)) for index, rewards in log.groups] == [(0, [0.0, 1.0])] * 2


async def test_groups_that_replace_others_are_not_shown_beyond_that_number() -> None:
    loop, _, log, _ = parts(FakeAgent(["1"]))  # all groups are constant: each step draws twice as many

    await train(settings(num_groups_to_log=1, max_refill_factor=2), loop)

    assert [index for index, _ in log.groups] == [0] * 2


async def test_a_step_of_constant_groups_trains_nothing_and_keeps_the_policy() -> None:
    trainer = FakeTrainer()
    loop, _, log, policy = parts(FakeAgent(["1"]), trainer)

    await train(settings(), loop)

    assert trainer.calls == []
    assert policy.published == [0]
    assert log.steps[0][1]["reward/constant_group_frac"] == 1.0


@pytest.mark.parametrize("kl", [{"kl_penalty_coef": 0.1}, {"loss": LossConfig(kl_loss_coef=0.1)}])
async def test_with_a_kl_term_a_step_of_constant_groups_still_pulls_towards_the_reference(kl: Any) -> None:
    trainer = FakeTrainer()
    loop, _, _, policy = parts(FakeAgent(["1"]), trainer)

    await train(settings(**kl), loop)

    assert trainer.calls == ["reference_logprobs", "forward_backward 4", "optim_step"] * 2
    assert policy.published == [0, 1, 2]


async def test_a_step_is_divided_by_all_judged_rollouts_however_many_groups_teach() -> None:
    # two groups of two; the second group's rollouts both succeed
    trainer = FakeTrainer()
    loop, *_ = parts(FakeAgent(["1", "0", "1", "1"]), trainer)

    await train(settings(max_steps=1), loop)

    assert [weight for call in trainer.beside for weight in call["token_weights"] or ()] == [1 / (4 * 1000)] * 2


async def test_a_resumed_run_sees_the_tasks_of_its_own_steps_and_no_baseline() -> None:
    loop, bench, log, policy = parts(FakeAgent(["1", "0"]))

    await train(settings(first_step=2), loop)

    starts = [event for event in bench.recorder.events if isinstance(event, SourceStarted)]
    assert [task.seed for task in starts[0].tasks] == [100, 101]
    assert policy.published == [1, 2]
    assert log.evaluations == [("eval", 2)]


async def test_a_run_resumed_with_other_tasks_begins_with_a_baseline_of_its_own() -> None:
    loop, _, log, _ = parts(FakeAgent(["1", "0"]))

    await train(settings(first_step=2, begins_curve=True), loop)

    assert log.evaluations == [("baseline", 1), ("eval", 2)]


async def test_checkpoints_follow_passes_over_the_tasks_and_the_log_says_how_many_are_done() -> None:
    # 2 groups a step of 3 tasks: passes end in steps 2 (4 of 3), 3 (6 of 6), 5 (10 of 9), 6 (12 of 12), 8 (16 of 15)
    loop, _, log, _ = parts(FakeAgent(["1", "0"]))
    chosen = settings(
        max_steps=9, groups_per_batch=2, num_tasks=3, save_every=0, checkpoints=CheckpointSettings(save_every_epochs=1)
    )

    assert [step for step in range(1, 10) if is_checkpoint_due(chosen, step)] == [2, 3, 5, 6, 8, 9]
    two = settings(
        max_steps=9, groups_per_batch=2, num_tasks=3, save_every=0, checkpoints=CheckpointSettings(save_every_epochs=2)
    )
    assert [step for step in range(1, 10) if is_checkpoint_due(two, step)] == [3, 6, 9]
    await train(settings(max_steps=2, groups_per_batch=2, num_tasks=3), loop)
    assert [metrics["progress/epoch"] for _, metrics in log.steps] == [pytest.approx(2 / 3), pytest.approx(4 / 3)]


async def test_disagreement_of_sampler_and_trainer_stops_the_run_before_anything_is_learned() -> None:
    trainer = FakeTrainer(gap=0.3)
    loop, *_ = parts(FakeAgent(["1", "0"]), trainer)

    with pytest.raises(ParityError, match="step 1"):
        await train(settings(), loop)

    assert trainer.calls == ["forward_backward 4"]


async def test_substeps_and_penalties_add_their_passes() -> None:
    trainer = FakeTrainer()
    loop, *_ = parts(FakeAgent(["1", "0"]), trainer)

    await train(settings(max_steps=1, num_substeps=2, kl_penalty_coef=0.1, compute_post_kl=True), loop)

    assert trainer.calls == [
        "reference_logprobs",
        "forward",
        "forward_backward 2",
        "optim_step",
        "forward_backward 2",
        "optim_step",
        "forward",
    ]
