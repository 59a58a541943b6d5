"""Measure how reliable a judge is: `python -m cua_rl.recipes.calibrate_judge run=runs/demo judge.model=... ...`

Asks the judge about recorded rollouts whose validators know the truth, prints how often it was right, and keeps the
record that training with this judge looks for. Nothing in the database changes.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import chz
from rich.console import Console
from rich.table import Table
from sqlalchemy import Row, select

from cua_rl.command_line.fields import check_numbers, setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.judge_models import JudgementRow
from cua_rl.database.models import RolloutRow, TaskRow, ValidationRow
from cua_rl.database.rebuild import load_rollouts
from cua_rl.evaluation.judge_calibration import Confusion, Judged, calibration_json, confusion, confusion_by
from cua_rl.judge.config import JudgeConfig, check_judge_settings
from cua_rl.judge.request import Case
from cua_rl.monitor.databases import Database
from cua_rl.reporting.step_line import num_of
from cua_rl.rollout.outcome import Judge
from cua_rl.run.judge import calibration_path, check_judge, make_judge_config, open_judge
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database
from cua_rl.types.errors import ConfigError, JudgeError
from cua_rl.types.judgement import Judgement

_BATCH = 32  # rollouts in memory at a time, with their screenshots


@chz.chz
class CalibrateConfig:
    """Measure a judge on recorded rollouts."""

    run: str = chz.field(
        doc="folder of a run (folder@model of an evaluation), or name or number of a run in DATABASE_URL"
    )
    num_rollouts: int = setting(
        300, "maximum number of rollouts to judge, drawn at random from those with a validator", at_least=1
    )
    seed: int = setting(0, "seed of the random choice of rollouts", at_least=0)
    log_dir: str | None = setting(
        None, "the results are written to judge_calibrations/ in it, where training finds them; None is ./runs"
    )
    out: str | None = setting(None, "file for the results, instead of judge_calibrations/")
    judge: JudgeConfig = chz.field(default_factory=JudgeConfig)

    @chz.validate
    def _calibration_makes_sense(self) -> None:
        check_numbers(self)
        check_judge_settings(self.judge)
        if self.judge.model is None:
            raise ValueError("judge.model: expected the judge to be calibrated, got none; set it and judge.base_url")


KnownRollout = Row[str, str, str]
"""A recorded rollout with a validator's verdict: its id, and instruction and category of its task."""


async def cli_main(config: CalibrateConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Draw, judge, print, write."""
    judge_config = make_judge_config(config.judge)
    assert judge_config is not None, "a validator of the class ensures that"
    await check_judge(judge_config, environ)
    path = calibration_path(judge_config, config.log_dir) if config.out is None else Path(config.out)
    async with open_run_database(config.run, environ) as (database, name):
        training_id = await find_training_id(database, name)
        known = await _draw(database, training_id, config)
        print(f"asking {judge_config.model} about {num_of(len(known), 'rollout')} of {config.run}", flush=True)
        async with open_judge(judge_config, environ) as judge:
            judged, judgements = await _judge_all(database, training_id, known, judge)
    if not confusion(judged).num_verdicts:
        raise JudgeError(f"expected verdicts of {judge_config.model!r}, got none: {judgements[0].reason}")
    # provenance and cost of the figures
    votes = [vote for judgement in judgements for vote in judgement.votes]
    record = calibration_json(
        judge_config,
        judged,
        {
            "run": config.run,
            "seed": config.seed,
            "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "prompt": judgements[0].prompt,
            "num_rollouts": len(judgements),
            "num_malformed_votes": sum(vote.is_malformed for vote in votes),
            "latency_s_mean": sum(judgement.duration_s for judgement in judgements) / len(judgements),
            "prompt_tokens": sum(vote.num_prompt_tokens for vote in votes),
            "answer_tokens": sum(vote.num_answer_tokens for vote in votes),
            "cost_usd": _cost_usd(judgements),
        },
    )
    await asyncio.to_thread(_write, path, record)
    _print(judge_config, judged, judgements)
    print(f"record in {path}")


async def _draw(database: Database, training_id: int, config: CalibrateConfig) -> list[KnownRollout]:
    """Finished rollouts with screenshots whose success no judge has decided; raises `ConfigError` if there are none."""
    query = (
        select(RolloutRow.rollout_id, TaskRow.instruction, TaskRow.category)
        .join(ValidationRow, ValidationRow.rollout_pk == RolloutRow.id)
        .join(TaskRow, RolloutRow.task_pk == TaskRow.id)
        .outerjoin(JudgementRow, JudgementRow.rollout_pk == RolloutRow.id)
        .where(
            RolloutRow.training_id == training_id,
            RolloutRow.status == "completed",
            RolloutRow.num_turns > 0,
            RolloutRow.pruned_at.is_(None),
            JudgementRow.decides.is_not(True),
        )
        .order_by(RolloutRow.id)
    )
    async with database.sessions() as session:
        rows = list(await session.execute(query))
    if not rows:
        raise ConfigError(
            f"run: expected finished rollouts of tasks with validators, got none in {config.run!r}; record some, such "
            "as an evaluation of the base model on demo tasks"
        )
    if len(rows) <= config.num_rollouts:
        return rows
    return [rows[place] for place in sorted(Random(config.seed).sample(range(len(rows)), config.num_rollouts))]


async def _judge_all(
    database: Database, training_id: int, known: Sequence[KnownRollout], judge: Judge
) -> tuple[list[Judged], list[Judgement]]:
    """Judge the rollouts in batches, so that their screenshots fit into memory."""
    judged: list[Judged] = []
    judgements: list[Judgement] = []
    for batch in (known[start : start + _BATCH] for start in range(0, len(known), _BATCH)):
        async with database.sessions() as session:
            rollouts = await load_rollouts(session, training_id, [item.rollout_id for item in batch])
        cases = [
            Case(
                instruction=item.instruction,
                turns=rollout.turns,
                answer=rollout.answer,
                stop_reason=rollout.stop_reason,
            )
            for item, rollout in zip(batch, rollouts, strict=True)
        ]
        said = await asyncio.gather(*(judge.judge(case, decides=False) for case in cases))
        judgements += said
        judged += [
            Judged(
                rollout_id=item.rollout_id,
                task_id=rollout.task_id,
                seed=rollout.seed,
                category=item.category,
                truth=rollout.success,
                verdict=judgement.success,
                agreement=judgement.agreement,
                reason=judgement.reason,
            )
            for item, rollout, judgement in zip(batch, rollouts, said, strict=True)
        ]
        print(f"{len(judged)} of {len(known)}", flush=True)
    return judged, judgements


def _cost_usd(judgements: Sequence[Judgement]) -> float | None:
    costs = [judgement.cost_usd for judgement in judgements if judgement.cost_usd is not None]
    return sum(costs) if costs else None


def _write(path: Path, record: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8", errors="replace")


def _print(config: JudgeConfig, judged: Sequence[Judged], judgements: Sequence[Judgement]) -> None:
    table = Table(title=f"{config.model}, {config.votes} votes, {config.screenshots} screenshots")
    for heading in (
        "",
        "rollouts",
        "TP",
        "FP",
        "FN",
        "TN",
        "no verdict",
        "precision",
        "recall",
        "false positives",
        "at half",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    _add_row(table, "all", confusion(judged))
    table.add_section()
    for name, matrix in confusion_by(judged, lambda item: item.category).items():
        _add_row(table, name, matrix)
    table.add_section()
    for name, matrix in confusion_by(judged, lambda item: item.task_id).items():
        _add_row(table, name, matrix)
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)
    cost = _cost_usd(judgements)
    latency_s = sum(judgement.duration_s for judgement in judgements) / len(judgements)
    print(f"{latency_s:.2f} s a rollout" + (f", {cost:.4f} US dollars in all" if cost is not None else ""))


def _add_row(table: Table, name: str, matrix: Confusion) -> None:
    counts = (matrix.true_positives, matrix.false_positives, matrix.false_negatives, matrix.true_negatives)
    rates = (matrix.precision, matrix.recall, matrix.false_positive_rate, matrix.balanced_precision)
    num_rollouts = matrix.num_verdicts + matrix.num_without_verdict
    shown = ["–" if value is None else f"{value:.1%} ({low:.0%} to {high:.0%})" for value, low, high in rates]
    table.add_row(name, *map(str, (num_rollouts, *counts, matrix.num_without_verdict)), *shown)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(CalibrateConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
