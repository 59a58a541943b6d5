"""Configuration of a judge, and the judge built from it."""

import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import chz

from cua_rl.command_line.number_checks import check_numbers
from cua_rl.command_line.plain_config import secret_names
from cua_rl.errors import ConfigError
from cua_rl.evaluation.judge_calibration import load_calibration
from cua_rl.judge.judge import DEFAULT_PROMPT, Judge, JudgeConfig
from cua_rl.run.log_directory import run_folder
from cua_rl.task_loader import TaskSet

logger = logging.getLogger(__name__)

CALIBRATIONS = "judge_calibrations"
"""Folder of calibration records inside `log_dir`, one file per judge: <fingerprint>.json."""


@chz.chz
class JudgeSettings:
    """The judge of tasks without a validator; there is none unless `judge_model` is set."""

    judge_base_url: str | None = chz.field(
        default=None,
        doc="URL of the judge's OpenAI-compatible endpoint, including /v1; its key is read from "
        "JUDGE_API_KEY, never stored",
    )
    judge_model: str | None = chz.field(
        default=None,
        doc="vision-language model that judges tasks without a validator from screenshots; None disables the judge",
    )
    judge: Literal["where_needed", "compare"] = chz.field(
        default="where_needed",
        doc="where_needed: judge only tasks without a validator; compare: judge all tasks, for comparison "
        "with the validators, which decide",
    )
    judge_prompt: str | None = chz.field(
        default=None, doc="text file with the judge's system prompt; None uses the package's"
    )
    judge_votes: int = chz.field(default=1, doc="votes per rollout, odd; more than half must agree")
    judge_screenshots: Literal["final", "all"] = chz.field(
        default="final", doc="screenshots that the judge sees: the last one, or all"
    )
    judge_timeout_s: float = chz.field(default=60.0, doc="limit for one vote, including retries after transport errors")
    judge_max_retries: int = chz.field(
        default=3,
        doc="retries after transport errors (no connection, 408, 409, 429, 5xx); received answers are never "
        "requested again",
    )
    judge_max_concurrent: int = chz.field(default=16, doc="maximum concurrent requests to the judge")
    judge_input_price: float | None = chz.field(
        default=None, doc="price of the judge's prompt tokens, US dollars per million; None records no cost"
    )
    judge_output_price: float | None = chz.field(
        default=None, doc="price of the judge's answer tokens, US dollars per million; None records no cost"
    )
    judge_extra: dict[str, object] = chz.field(
        default_factory=dict[str, object],
        doc='additional fields of every request to the judge, such as {"temperature": 0.5}',
    )

    @chz.validate
    def _judge_makes_sense(self) -> None:
        check_numbers(self, _SMALLEST, _RANGES)
        if self.judge_votes % 2 == 0:
            raise ValueError(f"judge_votes: expected an odd number, for majorities, got {self.judge_votes}; add one")
        for one, other in (("judge_base_url", "judge_model"), ("judge_input_price", "judge_output_price")):
            given, missing = (one, other) if getattr(self, other) is None else (other, one)
            if getattr(self, given) is not None and getattr(self, missing) is None:
                raise ValueError(f"{missing}: expected it beside {given}, got none; set both")
        if secrets := secret_names(self.judge_extra):
            raise ValueError(
                f"judge_extra: expected no secrets, which would be stored with the run, got {secrets[0]!r}; put the "
                "judge's key into JUDGE_API_KEY"
            )
        if taken := _OUR_FIELDS & set(self.judge_extra):
            raise ValueError(
                f"judge_extra: expected fields beside those that every request has, got {min(taken)!r}; leave it out"
            )


_OUR_FIELDS = frozenset({"model", "messages", "stream", "n"})
_SMALLEST = {
    "judge_votes": 1,
    "judge_max_retries": 0,
    "judge_max_concurrent": 1,
    "judge_input_price": 0.0,
    "judge_output_price": 0.0,
}
_RANGES = {"judge_timeout_s": (0.0, 86400.0)}


def make_judge_config(settings: JudgeSettings) -> JudgeConfig | None:
    """The judge that was asked for, None if none was; raises `ConfigError` for what can never work."""
    if settings.judge_base_url is None or settings.judge_model is None:
        return None
    if not settings.judge_base_url.startswith(("http://", "https://")):
        raise ConfigError(
            f"judge_base_url: expected an address such as 'http://localhost:8000/v1', got {settings.judge_base_url!r}; "
            "correct it"
        )
    if urlsplit(settings.judge_base_url).username is not None:
        raise ConfigError(
            "judge_base_url: expected an address without a name or password, which would be stored with the run, got "
            "one with them; put the key into JUDGE_API_KEY"
        )
    return JudgeConfig(
        base_url=settings.judge_base_url,
        model=settings.judge_model,
        prompt=_read_prompt(settings.judge_prompt),
        num_votes=settings.judge_votes,
        screenshots=settings.judge_screenshots,
        timeout_s=settings.judge_timeout_s,
        max_retries=settings.judge_max_retries,
        max_concurrent=settings.judge_max_concurrent,
        input_usd_per_mtok=settings.judge_input_price,
        output_usd_per_mtok=settings.judge_output_price,
        extra=settings.judge_extra,
    )


def plan_judge(settings: JudgeSettings, reward: str, *task_sets: TaskSet) -> JudgeConfig | None:
    """The judge that the tasks need or the user wants beside their validators; None without one.

    Raises:
        ConfigError: a judge is asked for and missing or idle.
    """
    config, is_needed = make_judge_config(settings), any(tasks.is_judged for tasks in task_sets)
    if reward == "judge" and config is None:
        raise ConfigError(
            "reward: expected judge_base_url and judge_model with reward=judge, got neither; name the judge, or choose "
            "another reward"
        )
    if reward == "judge" and not is_needed:
        raise ConfigError(
            "reward: expected tasks without a validator with reward=judge, got only tasks whose validators decide; set "
            "reward=binary (judge=compare records the judge's verdicts beside theirs)"
        )
    if config is None:
        return None
    if not is_needed and settings.judge != "compare":
        logger.warning("judge_model has no effect: all tasks have validators, which decide; judge=compare asks it too")
        return None
    return config


async def check_judge(config: JudgeConfig | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` if the judge cannot be reached or does not take the key."""
    if config is not None:
        async with open_judge(config, environ) as judge:
            await judge.check()


def require_precision(
    config: JudgeConfig, *, least: float | None, record: str | None, log_dir: str | None, is_forced: bool
) -> None:
    """Refuse a judge that is not known to be precise enough; its false positives would be learned.

    The lower end of the 95 % interval of its precision must reach `least`. Without `least`, an uncalibrated judge is
    warned of.

    Raises:
        ConfigError: it is not known to be, and nobody forces it.
    """
    path = calibration_path(config, log_dir) if record is None else Path(record).expanduser()
    problem = _problem(config, path, least, is_named=record is not None)
    if problem is None:
        return
    advice = (
        "calibrate it on recorded rollouts: python -m cua_rl.recipes.calibrate_judge run=... with the same judge_ "
        "settings (docs/judge.md), or set judge_force=true to train on it all the same"
    )
    if least is None or is_forced:
        logger.warning("%s; %s", problem, advice)
        return
    raise ConfigError(f"judge_min_precision: {problem}; {advice}")


def calibration_path(config: JudgeConfig, log_dir: str | None) -> Path:
    """Where the record of a judge's calibration is kept, unless somebody says otherwise."""
    return run_folder(None, log_dir, CALIBRATIONS) / f"{config.fingerprint}.json"


def _problem(config: JudgeConfig, path: Path, least: float | None, *, is_named: bool) -> str | None:
    if not path.exists() and not is_named:
        wanted = "" if least is None else f" of a precision of at least {least:g}"
        return f"expected a calibration{wanted} of judge {config.model!r} with this prompt, got none at {path}"
    calibration = load_calibration(path)
    if calibration.fingerprint != config.fingerprint:
        return (
            f"expected a calibration of judge {config.model!r} with this prompt, these votes, screenshots and extra "
            f"fields, got one of another judge in {path}"
        )
    value, low, high = calibration.precision
    if least is not None and (value is None or low < least):
        shown = "no verdict 'success'" if value is None else f"{value:.3f} ({low:.3f} to {high:.3f})"
        return (
            f"expected the 95 % interval of the judge's precision to begin at {least:g} or above, got {shown} from "
            f"{calibration.num_verdicts} rollouts in {path}"
        )
    return None


@asynccontextmanager
async def open_judge(config: JudgeConfig, environ: Mapping[str, str] = os.environ) -> AsyncGenerator[Judge]:
    """The judge, with its key from the environment."""
    async with Judge(config, environ.get("JUDGE_API_KEY")) as judge:
        yield judge


def _read_prompt(path: str | None) -> str:
    if path is None:
        return DEFAULT_PROMPT.read_text(encoding="utf-8")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge_prompt: expected a text file, got {path!r} ({error}); check the path") from None
    missing = [word for word in ('"success"', '"reason"') if word not in text]
    if missing:
        raise ConfigError(
            f"judge_prompt: expected a prompt that asks for a JSON object with {' and '.join(missing)}, got none in "
            f"{path!r}; copy from {DEFAULT_PROMPT}"
        )
    return text
