"""The judge of a run: built from its settings, checked against its calibration, opened with its API key."""

import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from cua_rl.command_line.fields import with_values
from cua_rl.evaluation.judge_calibration import load_calibration
from cua_rl.judge.config import JudgeConfig
from cua_rl.judge.grader import Grader
from cua_rl.judge.grader_file import look_up, read_grader
from cua_rl.judge.judge import DEFAULT_PROMPT, Judge
from cua_rl.rewards.load_reward import RFT_GRADER
from cua_rl.run.rollout_config import RolloutConfig
from cua_rl.run_folder.log_directory import run_folder
from cua_rl.task_loader import TaskSet
from cua_rl.types.errors import ConfigError, boundary

logger = logging.getLogger(__name__)

CALIBRATIONS = "judge_calibrations"
"""Folder of calibration records inside `log_dir`, one file per judge: <fingerprint>.json."""


def make_judge_config(settings: JudgeConfig) -> JudgeConfig | None:
    """The configured judge, None without one; raises `ConfigError` for settings that cannot work."""
    if settings.base_url is None or settings.model is None:
        return None
    if not settings.base_url.startswith(("http://", "https://")):
        raise ConfigError(
            f"judge.base_url: expected an address such as 'http://localhost:8000/v1', got {settings.base_url!r}; "
            "correct it"
        )
    with boundary(ConfigError, f"judge.base_url: expected an address, got {settings.base_url!r}; correct it"):
        parts = urlsplit(settings.base_url)
    if parts.username is not None:
        raise ConfigError(
            "judge.base_url: expected an address without a name or password, which would be stored with the run, got "
            "one with them; put the key into JUDGE_API_KEY"
        )
    return with_values(settings, prompt_text=_read_prompt(settings.prompt))


def has_judge(config: RolloutConfig) -> bool:
    """Whether something decides tasks without a validator: a judge, or a grader."""
    return config.judge.model is not None or config.reward.startswith(RFT_GRADER)


def plan_grader(settings: JudgeConfig, reward: str, *task_sets: TaskSet) -> JudgeConfig:
    """The grader in the judge's place; raises `ConfigError` for one that cannot grade these tasks."""
    path = Path(reward.removeprefix(RFT_GRADER))
    file = read_grader(path)
    for name, value, default in (("votes", settings.votes, 1), ("prompt", settings.prompt, None)):
        if value != default:
            raise ConfigError(
                f"judge.{name}: expected it without a grader, which has its own, got {value!r}; leave it out"
            )
    config = make_judge_config(settings)
    if file.models and config is None:
        raise ConfigError(
            f"judge.base_url: expected the endpoint and judge.model, which grader {file.name!r} asks in place of "
            f"{file.models[0].model!r}, got none; set judge.base_url and judge.model, and JUDGE_API_KEY"
        )
    given = {"task_id": "", "seed": 0, "instruction": ""}
    for template in (template for tasks in task_sets for template in tasks.templates):
        for variable in sorted(one for one in file.variables if one.startswith("item")):
            try:
                look_up(variable, {"item": {**given, **template.item}})
            except KeyError:
                raise ConfigError(
                    f"reward: expected tasks with the field {variable}, which {str(path)!r} names, got "
                    f'{template.task_id!r} without it; add it under "item" in the task (docs/rft_graders.md)'
                ) from None
    return with_values(config or settings, grader_text=file.text)


def plan_judge(
    settings: JudgeConfig, reward: str, *task_sets: TaskSet, is_told_to_agents: bool = False
) -> JudgeConfig | None:
    """The judge that tasks need, or that the user wants to compare with validators; None if neither.

    A judge that only agents ask, as harnesses may, does not count. Raises `ConfigError` if a judge is requested but not
    configured, or configured but never used.
    """
    config, is_needed = make_judge_config(settings), any(tasks.is_judged for tasks in task_sets)
    if reward == "judge" and config is None:
        raise ConfigError(
            "reward: expected judge.base_url and judge.model with reward=judge, got neither; name the judge, or choose "
            "another reward"
        )
    if reward == "judge" and not is_needed:
        raise ConfigError(
            "reward: expected tasks without a validator with reward=judge, got only tasks whose validators decide; set "
            "reward=binary (judge=compare records the judge's verdicts beside theirs)"
        )
    if config is None:
        return None
    if is_needed or settings.mode == "compare":
        return config
    if not is_told_to_agents:
        logger.warning("judge.model has no effect: all tasks have validators, which decide; judge=compare calls it too")
    return None


async def prepare_judge(
    config: RolloutConfig, tasks: TaskSet, held_out: TaskSet | None = None, *, log_dir: str | None = None
) -> JudgeConfig | None:
    """The judge of a run: it can be reached, and is precise enough if it decides `tasks`; raises `ConfigError`."""
    is_told = config.agent.name == "harness"
    used = (tasks,) if held_out is None else (tasks, held_out)
    if config.reward.startswith(RFT_GRADER):
        grader = plan_grader(config.judge, config.reward, *used)
        await check_judge(grader)
        return grader
    judge = plan_judge(config.judge, config.reward, *used, is_told_to_agents=is_told)
    await check_judge(judge)
    if judge is not None and tasks.is_judged:
        require_precision(judge, log_dir)
    return judge


async def check_judge(config: JudgeConfig | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` if the judge cannot be reached or does not take the key."""
    if config is not None:
        async with open_judge(config, environ) as judge:
            await judge.check()


def require_precision(config: JudgeConfig, log_dir: str | None) -> None:
    """Refuse a judge whose precision may be insufficient, because the policy would learn its false positives.

    The lower end of the 95 % interval must reach `min_precision`, for its precision on the recorded rollouts and for
    the precision with as many failures as successes: among rollouts that nearly all succeed, a judge that always says
    yes has a precision near 1. Without a minimum, an uncalibrated judge only causes a warning. Raises `ConfigError` if
    the precision is too low or unknown.
    """
    problem = _problem(config, log_dir)
    if problem is None:
        return
    advice = (
        "calibrate it on recorded rollouts: python -m cua_rl.recipes.calibrate_judge run=... with the same judge "
        "settings (docs/judge.md), or leave judge.min_precision out to train on it anyway"
    )
    if config.min_precision is None:
        logger.warning("%s; %s", problem, advice)
        return
    raise ConfigError(f"judge.min_precision: {problem}; {advice}")


def calibration_path(config: JudgeConfig, log_dir: str | None) -> Path:
    """Default path of a judge's calibration record."""
    return run_folder(None, log_dir, CALIBRATIONS) / f"{config.fingerprint}.json"


def _problem(config: JudgeConfig, log_dir: str | None) -> str | None:
    least, record = config.min_precision, config.calibration
    path = calibration_path(config, log_dir) if record is None else Path(record).expanduser()
    if not path.exists() and record is None:
        wanted = "" if least is None else f" of a precision of at least {least:g}"
        return f"expected a calibration{wanted} of judge {config.model!r} with this prompt, got none at {path}"
    calibration = load_calibration(path)
    if calibration.fingerprint != config.fingerprint:
        return (
            f"expected a calibration of judge {config.model!r} with this prompt, these votes, screenshots and extra "
            f"fields, got one of another judge in {path}"
        )
    for (value, low, high), name in (
        (calibration.precision, "precision"),
        (calibration.balanced_precision, "precision with as many failures as successes"),
    ):
        if least is not None and (value is None or low < least):
            shown = "no verdict 'success'" if value is None else f"{value:.3f} ({low:.3f} to {high:.3f})"
            return (
                f"expected the 95 % interval of the judge's {name} to begin at {least:g} or above, got {shown} from "
                f"{calibration.num_verdicts} rollouts in {path}"
            )
    return None


@asynccontextmanager
async def open_judge(config: JudgeConfig, environ: Mapping[str, str] = os.environ) -> AsyncGenerator[Judge | Grader]:
    """The judge or grader, with the key of its endpoint from the environment."""
    if config.base_url is None:
        yield Grader(config, None)
        return
    async with Judge(config, environ.get("JUDGE_API_KEY")) as judge:
        yield Grader(config, judge) if config.grader_text else judge


def _read_prompt(path: str | None) -> str:
    if path is None:
        return DEFAULT_PROMPT.read_text(encoding="utf-8")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge.prompt: expected a text file, got {path!r} ({error}); check the path") from None
    missing = [word for word in ('"success"', '"reason"') if word not in text]
    if missing:
        raise ConfigError(
            f"judge.prompt: expected a prompt that asks for a JSON object with {' and '.join(missing)}, got none in "
            f"{path!r}; copy from {DEFAULT_PROMPT}"
        )
    return text
