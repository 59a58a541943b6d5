"""Reads what an earlier attempt left in a run's folder: the settings and the checkpoint from which a run resumes.

`changed` in config.json holds one entry for each resume with other settings: {"after_step": 20, "settings": {"tasks":
[before, after]}, "begins_curve": true}. Results are compared within a curve only; curves count from 1.
"""

import copy
import json
import logging
import shlex
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from cua_rl.command_line.fields import given_settings
from cua_rl.command_line.parsing import make_config
from cua_rl.command_line.plain_config import find_stored
from cua_rl.command_line.settings import Setting, list_settings
from cua_rl.command_line.values import UnfitValueError, as_argument, parse_value
from cua_rl.host.masking import MASK, is_secret_name
from cua_rl.reporting.json_lines import read_records
from cua_rl.run_folder.log_directory import (
    Behavior,
    Checkpoint,
    check_log_directory,
    is_run_folder,
    load_settings,
    newest_checkpoint,
    read_checkpoints,
)
from cua_rl.run_folder.model_folder import repository_of
from cua_rl.types.errors import ConfigError, boundary

logger = logging.getLogger(__name__)
Config = TypeVar("Config")

Recipe = Literal["train", "sft"]
_OWN_SETTING: Mapping[Recipe, str] = {"train": "groups_per_batch", "sft": "batch_size"}
CHANGED = "changed"
POLICY = ("preset", "model_name", "lora_rank", "trainer.lora_alpha", "trainer.lora_modules", "load_checkpoint_path")
"""With others, the weights of a checkpoint would be another policy."""
CURVE = (
    "tasks", "eval_tasks", "tasks_sha256", "seed", "curriculum.task_sampling", "reward", "reward_clip",
    "credit.milestone_reward", "judge_fingerprint", "loss.name", "advantages", "credit.turn_weight", "credit.discount",
    "credit.moving_top", "branching.num_siblings", "branching.at", "device", "box_type",
    "max_turns", "max_tokens", "temperature", "renderer_name", "server.max_model_len", "server.max_pixels",
    "evaluation.num_eval_rollouts", "evaluation.eval_attempts", "evaluation.eval_temperature",
    "devices.coordinate_mode", "devices.screen_scale", "devices.browser_scale", "devices.adb_snapshot",
    "agent.name", "agent.command", "agent.url", "agent.harness_command", "agent.harness_url",
    "agent.gbox_mini_agent_agent", "agent.gbox_mini_agent_standard_action_space",
    "agent.action_format", "agent.history", "agent.history_images",
)  # fmt: skip
"""With others, success before and after is not the same quantity, or not of the same training."""


_CHOOSE_TASKS = {"tasks", "eval_tasks", "seed", "evaluation.num_eval_rollouts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierAttempt:
    """What a resumed run continues from."""

    path: Path
    settings: Mapping[str, Any]
    """Those of the step after the checkpoint, as config.json has them."""
    changed: Sequence[Mapping[str, Any]]
    """The entries of earlier resumes up to the checkpoint."""
    checkpoint: Checkpoint | None
    last_step: int
    """The last step that was trained; those after the checkpoint run again."""

    @property
    def num_done(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def reference(self) -> Path | None:
        """The run's copy of the weights that it began with, if those were of another run."""
        copied = self.path / "reference"
        return copied if self.checkpoint is not None and copied.is_dir() else None

    def complete(self, config: Config) -> Config:
        """The configuration with the attempt's value of every setting not given; raises `ConfigError` for a secret."""
        values, given = dict[str, object](), given_settings(config)
        for setting in kept_settings(type(config)):
            is_stored, value = find_stored(self.settings, setting.name, is_for_group=setting.is_for_group)
            is_given = setting.name in given
            if setting.name == "model_name" and is_given and repository_of(str(value)) == given["model_name"]:
                del given["model_name"]  # the commit that the run began with
                is_given = False
            if not is_stored or is_given:
                continue
            if MASK in json.dumps(value):
                raise ConfigError(
                    f"{setting.name}: expected it again, because the secret in it is not stored, got none; set it to "
                    f"what it was when the run in {str(self.path)!r} began"
                )
            try:
                values[setting.name] = parse_value(as_argument(value), setting.kind)
            except UnfitValueError as error:
                logger.warning("%s: this version expects %s, the run had %r", setting.name, error, value)
        return make_config(type(config), values | given | {"log_path": str(self.path)})

    def describe(self, config: object, now: Mapping[str, Any]) -> list[str]:
        """Which run is resumed, from which step, and with which other settings; `now` is the new config.json."""
        weights = "no checkpoint" if self.checkpoint is None else f"weights/{self.checkpoint.state_path.name}"
        again = ""
        if self.last_step > self.num_done:
            again = f"; steps {self.num_done + 1} to {self.last_step} are dropped and run again"
        lines = [f"resumes {self.path} after step {self.num_done} ({weights}){again}"]
        differences = self.differences(config, now)
        for name, (was, wanted) in differences.items():
            if name == "tasks_sha256" and differences.keys() & _CHOOSE_TASKS:
                continue  # it follows from these
            lines.append(f"  {name}={as_argument(wanted)}, was {as_argument(was)}")
        lines += [
            f"  {name}={as_argument(self.settings[name])} is left out: this version has no such setting"
            for name in sorted(self.settings.keys() - now.keys() - {CHANGED})
        ]
        if self.num_done >= (now.get("num_steps") or now["max_steps"]):
            lines.append(f"  all {self.num_done} steps are done: raise max_steps to train on")
        return lines

    def differences(self, config: object, now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The settings that differ from the attempt's, with both values."""
        names = [(setting.name, setting.is_for_group) for setting in kept_settings(type(config))]
        found: dict[str, tuple[Any, Any]] = {}
        for name, is_for_group in [*names, ("tasks_sha256", False), ("judge_fingerprint", False)]:
            is_stored, was = find_stored(self.settings, name, is_for_group=is_for_group)
            _, wanted = find_stored(now, name)
            if name == "model_name" and was and wanted and is_same_model(Path(was).name, Path(wanted).name):
                continue  # its folder may have moved
            if is_stored and was != wanted:
                found[name] = (was, wanted)
        return found

    def record(self, config: object, now: Mapping[str, Any], *, allows_changes: bool) -> list[Mapping[str, Any]]:
        """The new `changed` entries; raises `ConfigError` for another policy, or another curve if it must stay."""
        differences = self.differences(config, now)
        if not self.num_done:  # nothing has been trained yet
            return []
        changes_curve = [name for name in differences if name in CURVE]
        refused = [name for name in differences if name in POLICY] or ([] if allows_changes else changes_curve)
        for name in refused:
            was, wanted = differences[name]
            others = ", or set resume_with=changes, which begins a new curve" if name in CURVE else ""
            what = "the same tasks" if name == "tasks_sha256" else repr(was)
            got = f"others from {now.get('tasks')!r}" if name == "tasks_sha256" else repr(wanted)
            raise ConfigError(
                f"{name}: expected {what} as when the run in {str(self.path)!r} began, got {got}; go on with the "
                f"same, or choose another log_path{others}"
            )
        entry = {"after_step": self.num_done, "settings": differences, "begins_curve": bool(changes_curve)}
        return [*self.changed, *([entry] if differences else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A part of a run within which results are comparable."""

    number: int
    after_step: int
    """Its baseline is the policy after this step."""


def curve_at(settings: Mapping[str, Any], step: int) -> Curve:
    """The curve to which training step `step` belongs, according to a config.json."""
    entries: Sequence[Mapping[str, Any]] = settings.get(CHANGED, ())
    starts = [entry["after_step"] for entry in entries if entry["begins_curve"] and entry["after_step"] < step]
    return Curve(number=1 + len(starts), after_step=starts[-1] if starts else 0)


def settings_at(settings: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The settings with which training step `step` ran, according to the run's config.json."""
    entries: Sequence[Mapping[str, Any]] = settings.get(CHANGED, ())
    before = copy.deepcopy(dict(settings))
    for entry in reversed([entry for entry in entries if entry["after_step"] >= step]):
        for path, (was, _) in entry["settings"].items():
            *groups, name = path.split(".")
            place = before
            for group in groups:
                place = place.setdefault(group, {})
            place[name] = was
    before[CHANGED] = [entry for entry in entries if entry["after_step"] < step]
    return before


def kept_settings(config_class: type[Any]) -> list[Setting]:
    """The settings that a resumed run takes from the earlier attempt: all but those of one start, and secrets."""
    settings = [setting for setting in list_settings(config_class) if setting.group is None]
    return [each for each in settings if not each.is_per_attempt and not is_secret_name(each.name)]


def is_same_model(was: str, wanted: str) -> bool:
    """Whether both name the same commit; folders and runs of earlier versions state none."""
    are_pinned = "@" in was and "@" in wanted
    return was == wanted or (not are_pinned and repository_of(was) == repository_of(wanted))


def find_earlier_attempt(path: Path, behavior: Behavior, step: int | None, recipe: Recipe) -> EarlierAttempt | None:
    """The attempt to resume, if one is to be; `step` chooses its checkpoint.

    Raises:
        ConfigError: there is no complete checkpoint of that step, the run is of another recipe, or another run uses the
            folder.
    """
    check_log_directory(path, behavior)
    with boundary(
        ConfigError, f"log_path: expected a run that this version can read, got {str(path)!r}; choose another"
    ):
        has_run = is_run_folder(path) and ((path / "config.json").is_file() or bool(read_checkpoints(path)))
        if behavior != "resume" or not has_run:
            if behavior == "resume":
                print(f"{path} holds no run to resume: a new one begins there", file=sys.stderr)
            if step is not None:
                raise ConfigError(
                    f"resume_step: expected behavior_if_log_dir_exists=resume and the folder of a run, got {step} for "
                    f"{str(path)!r}; name the folder with log_path"
                )
            return None
        checkpoint = newest_checkpoint(path, step)
        if step is not None and checkpoint is None:
            steps = [each.step for each in read_checkpoints(path)]
            raise ConfigError(
                f"resume_step: expected the step of a complete checkpoint, one of {steps}, got {step}; choose one, or "
                "leave it out"
            )
        stored = load_settings(path, "log_path")
        if stored and _OWN_SETTING[recipe] not in stored:
            raise ConfigError(
                f"log_path: expected a run of recipes.{recipe} to resume, got one of another recipe in {str(path)!r}; "
                "choose another log_path"
            )
        trained = [record for record in read_records(path / "metrics.jsonl") if "progress/step" in record]
        settings = settings_at(stored, (checkpoint.step if checkpoint else 0) + 1)
        return EarlierAttempt(
            path=path,
            settings=settings,
            changed=settings[CHANGED],
            checkpoint=checkpoint,
            last_step=max((int(str(record["step"])) for record in trained), default=0),
        )


@contextmanager
def say_how_to_go_on(path: Path, recipe: Recipe) -> Generator[None]:
    """If the run in the block is stopped or fails, say from which checkpoint and with which command to resume."""
    try:
        yield
    except BaseException:
        print(how_to_go_on(path, recipe), file=sys.stderr, flush=True)
        raise


def how_to_go_on(path: Path, recipe: Recipe) -> str:
    """The newest checkpoint of a run, and the command that continues it."""
    newest = newest_checkpoint(path)
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    words = [python, "-m", f"cua_rl.recipes.{recipe}", f"log_path={path}", "behavior_if_log_dir_exists=resume"]
    saved = f"the newest checkpoint is {newest.state_path}" if newest else "there is no checkpoint yet"
    return f"{saved}; continue with\n    {shlex.join(words)}"
