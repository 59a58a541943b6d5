"""What recipes would find out about a run, and a way to record it; figures are made up, their shape is the recipes'."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from cua_rl.database.analysis_models import Analysis
from cua_rl.database.models import RolloutRow, Step
from cua_rl.database.session import make_writer_engine
from cua_rl.evaluation.attempts import Attempt
from cua_rl.recipes.replay_step import as_json
from cua_rl.reporting.asked import Answer, AskedTurn, CheckpointAnswers
from cua_rl.reporting.what_if import RolloutChange, Variant
from cua_rl.rl.config import LoopConfig
from cua_rl.run.replay import Replay
from cua_rl.run.suite import SuiteConfig, compare_checkpoints
from cua_rl.types.actions import Action, Click, TypeText


def save(url: str, run_id: str, result: Mapping[str, object], *, rollout_id: str | None = None, **place: Any) -> None:
    """Record a result as the recipes do."""
    engine = make_writer_engine(url)
    with Session(engine) as session, session.begin():
        found = select(RolloutRow.id).where(RolloutRow.rollout_id == rollout_id)
        rollout_pk = None if rollout_id is None else session.scalars(found).one()
        session.add(Analysis(training_id=int(run_id), rollout_pk=rollout_pk, result=dict(result), **place))
    engine.dispose()


def suite_result(before: Sequence[bool], now: Sequence[bool], *, accepted: str, first: str, second: str) -> Any:
    """A comparison as `suite.json` has it, of two checkpoints with these outcomes; `accepted` afterwards."""
    config = SuiteConfig(num_tasks=len(before))
    attempts = [
        Attempt(
            model=model, position=place, task_id=f"task-{place}", seed=0, attempt=0, category="app", difficulty="easy",
            success=done, reward=float(done), num_turns=1, stop_reason="finished", num_faults=0, duration_s=1.0,
        )
        for model, outcomes in ((first, before), (second, now))
        for place, done in enumerate(outcomes)
    ]  # fmt: skip
    promise = {"fall": config.fall, "churn": config.churn, "false_alarms": config.false_alarms}
    return {**asdict(compare_checkpoints(config, attempts, first, second)), **promise, "accepted": accepted}


def replay_result(
    rollouts: Sequence[Mapping[str, Any]], variants: Mapping[str, float], *, is_equal: bool = True
) -> Any:
    """A step made again, and with settings that change every rollout by its advantage times a factor."""
    row = Step(step=1, datums_sha256="0" * 64, trained_on="a CPU")
    replay = Replay(
        row=row, config=LoopConfig(), groups=(), start=0, before=Path(), after=Path(), trained_on="a CPU",
        logprob_gap=0.0 if is_equal else 0.01,
    )  # fmt: skip
    found = {"num": 1376, "is_equal": is_equal, "largest": 0.0 if is_equal else 1e-3, "scale": 0.5}
    made = [
        Variant(
            settings={name.partition("=")[0]: name.partition("=")[2]} if name else {},
            norm=abs(factor),
            relative_norm=abs(factor),
            cosine=None if factor == 0 else 1.0 if factor > 0 else -1.0,
            gradient_cosine=None,
            rollouts=[
                RolloutChange(
                    rollout_id=one["rollout_id"],
                    task_id=one["task_id"],
                    success=bool(one["success"]),
                    advantage=one["advantage"],
                    change=factor * (one["advantage"] or 0.0),
                )
                for one in rollouts
            ],
        )
        for name, factor in variants.items()
    ]
    return {**as_json(replay, {"adapter": None, "optimizer": None}, made), "adapter": found}


def asked_result(rollout_id: str, turn: int, recorded: Action, clicks: Mapping[str, Sequence[Click]]) -> Any:
    """The checkpoints of these names, which click there; each finds the recorded answer a nat likelier."""

    def answer(action: Action) -> Answer:
        return Answer(text="so", done=repr(action), actions=(action,), logprobs=(-1.0, -0.5))

    checkpoints = [
        CheckpointAnswers(
            name=name,
            is_own=place == 1,
            logprobs=(-4.0 + place, -0.5),
            mean_abs_gap=0.001 * place,
            samples=(*map(answer, found), answer(TypeText(text="\x00 no click"))),
        )
        for place, (name, found) in enumerate(clicks.items())
    ]
    return AskedTurn(
        rollout_id=rollout_id, turn=turn, policy_version=1, temperature=1.0, recorded=answer(recorded),
        checkpoints=checkpoints, seen=None,
    ).as_json()  # fmt: skip
