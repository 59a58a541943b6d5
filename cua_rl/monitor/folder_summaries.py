"""Summaries of runs whose database is not open, from the files of their folders."""

import json
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from cua_rl.monitor import schemas
from cua_rl.monitor.databases import RunFolder
from cua_rl.monitor.figures import curve_ends, finite, thin
from cua_rl.monitor.run_summaries import SPARKLINE_POINTS, model_name, share_done
from cua_rl.reporting.json_lines import read_records, write_text
from cua_rl.types.json_values import Json, mapping


def summarise_folders(folders: Iterable[RunFolder]) -> list[schemas.RunSummary]:
    """The runs as a list shows them; `<key>.0` stands for one until its database is open and knows its number."""
    found: list[schemas.RunSummary] = []
    for shown in folders:
        with suppress(FileNotFoundError):  # it has been deleted meanwhile
            began_at = (shown.path / "postgres" / "PG_VERSION").stat().st_mtime
            measured, ended, configured = (
                max(path.stat().st_mtime if path.exists() else 0.0 for path in map(shown.path.joinpath, names))
                for names in _FILES
            )
            found.append(_summarise(shown.path, shown.key, began_at, measured, ended, configured))
    return found


_MARK = "mark.json"
_FILES = (("metrics.jsonl", "attempts.jsonl"), ("summary.json", "results.json"), ("config.json", _MARK))


@lru_cache(maxsize=4096)
def _summarise(
    folder: Path, key: str, began_at: float, measured_at: float, ended_at: float, configured_at: float
) -> schemas.RunSummary:
    config = read_settings(folder)
    records = read_records(folder / "metrics.jsonl")
    steps = [one for one in records if "reward/success_rate" in one and isinstance(one.get("step"), int)]
    evaluations = [one for one in records if "eval/held_out/success_rate" in one]
    rates = [finite(one["reward/success_rate"]) for one in steps]
    num_steps = int(finite(steps[-1]["step"]) or 0) if steps else 0
    total = config.get("max_steps")
    total_steps = total if isinstance(total, int) else num_steps
    seen_at = max(measured_at, ended_at, began_at)
    held_out = [one for one in evaluations if one.get("step") != 0]
    is_done = ended_at > 0 and num_steps >= total_steps
    return schemas.RunSummary(
        **_read_mark(folder).model_dump(),
        run_id=f"{key}.0",
        run_name=folder.name,
        log_path=str(folder),
        project=None,
        model_name=model_name(config),
        status="completed" if is_done else "running",
        is_alive=False,
        error=None,
        num_completed_steps=num_steps,
        total_steps=total_steps,
        progress=share_done(num_steps, total_steps, is_done),
        step_time_s=None,
        eta_s=None,
        eta_is_lower_bound=False,
        elapsed_s=max(0.0, seen_at - began_at),
        started_at=datetime.fromtimestamp(began_at, UTC),
        ended_at=datetime.fromtimestamp(ended_at, UTC) if is_done else None,
        heartbeat_at=datetime.fromtimestamp(seen_at, UTC),
        num_attempts=1,
        success_rate=rates[-1] if rates else None,
        reward_mean=finite(steps[-1].get("reward/mean")) if steps else None,
        success_step=num_steps if steps else None,
        running_step=None,
        baseline=next((_rate(one) for one in evaluations if one.get("step") == 0), None),
        baseline_step=0 if any(one.get("step") == 0 for one in evaluations) else None,
        last_eval=_rate(held_out[-1]) if held_out else None,
        last_eval_step=int(finite(held_out[-1].get("step")) or 0) if held_out else None,
        sparkline=thin(rates, SPARKLINE_POINTS),
        curve_ends=curve_ends(config),
    )


def write_mark(folder: Path, mark: schemas.RunMark) -> None:
    """Keep what people call the run where a list finds it without the run's database."""
    write_text(folder / _MARK, mark.model_dump_json())


def _read_mark(folder: Path) -> schemas.RunMark:
    try:
        return schemas.RunMark.model_validate_json((folder / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it was cut short
        return schemas.RunMark()


def read_settings(folder: Path) -> Json:
    """The run's configuration, empty if it cannot be read."""
    try:
        return mapping(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}


def _rate(record: dict[str, object]) -> schemas.Rate:
    """An evaluation's success as the run itself reported it."""
    low, high = (
        finite(record.get("eval/held_out/success_rate_low")),
        finite(record.get("eval/held_out/success_rate_high")),
    )
    done, lost = finite(record.get("eval/held_out/num_rollouts")), finite(record.get("eval/held_out/short_tasks/1"))
    won = finite(record.get("eval/held_out/num_successes"))
    return schemas.Rate(
        rate=finite(record["eval/held_out/success_rate"]),
        low=0.0 if low is None else low,
        high=1.0 if high is None else high,
        num_successes=int(won or 0),
        num_rollouts=int(done or 0),
        num_independent=0.0,  # for bands of smoothed curves, which need the database
        num_lost_tasks=int(lost or 0),
    )
