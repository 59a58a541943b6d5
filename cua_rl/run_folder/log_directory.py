"""A run's folder: its lock, configuration, metrics file and checkpoints.

config.json              the settings, secrets masked
metrics.jsonl            one JSON object per completed step
outcomes.jsonl           one JSON object per completed step: how each of its groups went
checkpoints.jsonl        one JSON object per checkpoint, the newest last
weights/000080           what training resumes from after 80 optimizer steps
sampler_weights/000080   only the adapter, as the model server loads it
"""

import fcntl
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self, cast

from cua_rl.host.masking import is_line
from cua_rl.host.system import is_locked
from cua_rl.reporting.json_lines import append_record, read_records, write_records, write_text
from cua_rl.run_folder.checkpoints import find_damage
from cua_rl.training.folders import mend_folders
from cua_rl.types.errors import ConfigError, boundary

logger = logging.getLogger(__name__)

Behavior = Literal["ask", "overwrite", "skip", "resume"]
LOCK_NAME = ".cua_rl.lock"
_RESULT_FILES = ("metrics.jsonl", "attempts.jsonl", "checkpoints.jsonl", "outcomes.jsonl")


class Decision(StrEnum):
    """What to do with the folder of a run."""

    FRESH = "fresh"
    """Begin a run in an empty folder."""
    RESUME = "resume"
    """Continue after the latest checkpoint, if there is one."""
    SKIP = "skip"
    """Keep the earlier run and exit."""


def run_folder(log_path: str | None, log_dir: str | None, run_name: str) -> Path:
    """Where a run writes: `log_path`, or a folder of the run's name in `log_dir`."""
    return (Path(log_dir or "runs") / run_name if log_path is None else Path(log_path)).expanduser().absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is on disk after `step` optimizer steps."""

    step: int
    state_path: Path
    sampler_path: Path
    is_final: bool = False
    is_interim: bool = False
    """Whether it stays only until the next one: every step is saved, few of them for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDirectory:
    """A run's folder, locked against a second run until the context manager is left or the process ends."""

    path: Path
    decision: Decision
    _lock: int = field(repr=False)
    """Descriptor of the lock file; the lock goes with it."""
    _umask: int = field(repr=False)
    """The process's umask before; while the folder is in use, only their owner can read new files."""

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints.jsonl"

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    def state_path(self, step: int) -> Path:
        """Where the training state after `step` optimizer steps belongs: weights/000080."""
        return self.path / "weights" / f"{step:06d}"

    def sampler_path(self, step: int) -> Path:
        """Where the adapter after `step` optimizer steps belongs: sampler_weights/000080."""
        return self.path / "sampler_weights" / f"{step:06d}"

    def write_config(self, config: Mapping[str, object]) -> None:
        """Write config.json; `config` is what `plain_config` made, without secrets."""
        write_text(self.config_path, json.dumps(config, indent=2) + "\n")

    def record_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Append a checkpoint whose folders are complete; it is durable when this returns."""
        record = {
            "name": f"{checkpoint.step:06d}",
            "step": checkpoint.step,
            "final": checkpoint.is_final,
            "interim": checkpoint.is_interim,
            "state_path": self._stored(checkpoint.state_path),
            "sampler_path": self._stored(checkpoint.sampler_path),
        }
        append_record(self.checkpoints_path, record)

    def checkpoints(self) -> list[Checkpoint]:
        """All recorded checkpoints, oldest first; damaged lines are skipped with a warning."""
        return read_checkpoints(self.path)

    def prune_checkpoints(self, keep_newest: int, keep_every: int = 0) -> list[int]:
        """Keep the newest checkpoints and those whose step is a multiple of `keep_every`; returns the kept steps.

        With `keep_newest` 0 all are kept. An interim one is kept only as long as it is the newest of all. The training
        state of a pruned checkpoint is deleted at once; its adapter stays until the model server has unloaded it.
        """
        checkpoints = self.checkpoints()
        lasting = [checkpoint for checkpoint in checkpoints if not checkpoint.is_interim]
        newest = lasting[-keep_newest:] if keep_newest else lasting
        steps = {checkpoint.step for checkpoint in [*newest, *checkpoints[-1:]]}
        steps |= {each.step for each in lasting if keep_every and each.step % keep_every == 0}
        pruned = [checkpoint for checkpoint in checkpoints if checkpoint.step not in steps]
        if pruned:
            records = [record for record in read_records(self.checkpoints_path) if _step(record) in steps]
            # first: a crash in between may leave a folder without a record, never a record without its folder
            write_records(self.checkpoints_path, records)
        for checkpoint in pruned:
            shutil.rmtree(checkpoint.state_path, ignore_errors=True)
        return sorted(steps)

    def remove_strays(self, num_steps: int, keep: Collection[int] = ()) -> None:
        """Delete adapters and states of steps that a killed attempt left behind and no checkpoint refers to, and
        everything after `num_steps` steps, which will be made again; those of steps in `keep` stay.
        """
        steps = {*keep, *(checkpoint.step for checkpoint in self.checkpoints())}
        for path in [*self.path.glob("weights/*"), *self.path.glob("sampler_weights/*")]:
            is_half_written = ".partial-" in path.name or ".replaced-" in path.name  # see training/folders.py
            if is_half_written or (path.name.isdigit() and (int(path.name) not in steps or int(path.name) > num_steps)):
                shutil.rmtree(path)

    def truncate_after(self, step: int) -> None:
        """Remove metrics and checkpoints of later steps: a run that resumes after `step` writes them again."""
        for path in (self.metrics_path, self.checkpoints_path):
            records = read_records(path)
            kept = [record for record in records if _step(record) <= step]
            write_records(path, kept)
            if len(kept) < len(records):
                logger.info("dropped records=%s after step=%s file=%s", len(records) - len(kept), step, path.name)

    def close(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.umask(self._umask)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stored(self, path: Path) -> str:
        """Paths inside the folder are stored relative to it, so that the folder can be moved."""
        absolute = path.absolute()
        return str(absolute.relative_to(self.path)) if absolute.is_relative_to(self.path) else str(absolute)


def choose_behavior(path: Path, behavior: Behavior) -> Behavior:
    """What to do with the folder; "ask" becomes what a person answers at the terminal."""
    if behavior != "ask" or not (is_run_folder(path) and _has_results(path)):
        return behavior
    answers: Mapping[Decision, Behavior] = {
        Decision.FRESH: "overwrite",
        Decision.SKIP: "skip",
        Decision.RESUME: "resume",
    }
    return answers[_decide(path, "ask", None)]


def prepare_log_directory(path: Path, behavior: Behavior, *, ask: Callable[[str], str] | None = None) -> LogDirectory:
    """Lock the run's folder and decide what to do with what is in it; a context manager that releases it.

    Only the owner may look into the folder, and into the files that this process and its children make meanwhile.

    `ask` puts a question to a person and returns the answer; by default the terminal, if there is one. A run that
    failed before it had any result is not asked about. "overwrite" deletes only folders that hold a run of ours. Raises
    `ConfigError` if the folder holds something else, another run is using it, or there is no terminal to ask on.
    """
    path = path.expanduser().absolute()
    is_used = is_run_folder(path)
    if not is_used:
        _require_makeable(path)
    with boundary(ConfigError, f"log_path {str(path)!r} cannot be used"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o700)  # screenshots, prompts and weights are private
        lock = _lock(path)
    umask = os.umask(0o066)  # not 077: users of services pass through folders of ours to what is theirs
    try:
        decision = _decide(path, behavior, ask) if is_used else Decision.FRESH
        if decision is Decision.FRESH:
            for entry in path.iterdir():
                if entry.name == LOCK_NAME:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            write_text(path / "metrics.jsonl", "")
        for parent in (*path.glob("*weights"), *path.glob("*weights/*")):  # a Tinker service has a folder per model
            mend_folders(parent)
    except BaseException:
        os.umask(umask)
        os.close(lock)
        raise
    return LogDirectory(path=path, decision=decision, _lock=lock, _umask=umask)


def read_checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoints that the run in a folder has recorded, oldest first."""
    return [
        Checkpoint(
            step=_step(record),
            state_path=folder / str(record["state_path"]),
            sampler_path=folder / str(record["sampler_path"]),
            is_final=bool(record.get("final", False)),
            is_interim=bool(record.get("interim", False)),
        )
        for record in read_records(folder / "checkpoints.jsonl")
    ]


def newest_checkpoint(folder: Path, step: int | None = None) -> Checkpoint | None:
    """The newest complete checkpoint, or that of `step`; damaged ones are passed over with a warning each."""
    for checkpoint in reversed(read_checkpoints(folder)):
        if step not in (None, checkpoint.step):
            continue
        damage = find_damage(checkpoint.state_path) or find_damage(checkpoint.sampler_path)
        if damage is None:
            return checkpoint
        logger.warning("skipping checkpoint step=%s: %s", checkpoint.step, damage)
    return None


def load_settings(folder: Path, setting: str) -> dict[str, Any]:
    """The config.json of a run's folder; raises `ConfigError` that begins with `setting` if it cannot be read."""
    path = folder / "config.json"
    with boundary(ConfigError, f"{setting}: expected a run's settings in {str(path)!r}"):
        return json.loads(path.read_text(encoding="utf-8"))


def check_log_directory(path: Path, behavior: Behavior) -> None:
    """Raise `ConfigError` where `prepare_log_directory` would, without a person to ask; changes nothing."""
    path = path.expanduser().absolute()
    if not is_run_folder(path):
        _require_makeable(path)
    elif is_locked(path / LOCK_NAME):
        raise ConfigError(_in_use(path, (path / LOCK_NAME).read_text(errors="replace")))
    elif behavior == "ask" and not sys.stdin.isatty() and _has_results(path):
        raise ConfigError(_nobody_to_ask(path))


def new_folder(setting: str, given: str) -> Path:
    """The absolute path of a folder that does not exist or is empty; raises `ConfigError` for another one."""
    path = Path(given).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{setting}: expected a folder that does not exist or is empty, got {given!r}; name another")
    return path


def is_run_folder(path: Path) -> bool:
    """Whether the folder holds an earlier run; raises `ConfigError` if it holds something else."""
    with boundary(ConfigError, f"log_path: expected a folder that can be read, got {str(path)!r}; choose another"):
        if not path.exists():
            return False
        if path.is_dir():
            names = {entry.name for entry in path.iterdir()}
            if names <= {LOCK_NAME}:  # all that a run left which ended before it wrote anything
                return False
            if ".git" not in names and (LOCK_NAME in names or {"config.json", "metrics.jsonl"} <= names):
                return True
    raise ConfigError(
        f"expected log_path to be a new folder, an empty one or one of an earlier run, got {str(path)!r} with other "
        "things in it; choose another log_path"
    )


def _require_makeable(path: Path) -> None:
    if not is_line(str(path)):  # its name is the run's
        raise ConfigError(f"log_path: expected a path without line breaks and controls, got {str(path)!r}; rename it")
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(
            f"log_path: expected a folder that can be made, got {str(path)!r} below {str(existing)!r}, where "
            "nothing can be written; choose another log_path"
        )


def _has_results(path: Path) -> bool:
    """Whether the earlier run has results; without any metric, it is overwritten without asking."""
    return any(file.is_file() and file.stat().st_size > 0 for file in (path / name for name in _RESULT_FILES))


def _nobody_to_ask(path: Path) -> str:
    return (
        f"expected log_path to be new, got {str(path)!r}, which holds an earlier run, and no terminal to ask on; set "
        "behavior_if_log_dir_exists to overwrite, skip or resume"
    )


def _in_use(path: Path, owner: str) -> str:
    return (
        f"expected log_path to be free, got {str(path)!r}, which another run (process {owner.strip() or '?'}) is "
        "using; stop it or choose another log_path"
    )


def _step(record: Mapping[str, object]) -> int:
    return cast("int", record["step"])


def _lock(path: Path) -> int:
    """Hold the folder for this process; the kernel releases it however it ends, and children do not inherit it."""
    lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace")
        os.close(lock)
        raise ConfigError(_in_use(path, owner)) from None
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _ask_person(question: str) -> str:
    """What a person types; nothing at the end of the input."""
    # signals end the process at once: the event loop, which handles them otherwise, waits here
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return input(question)
    except EOFError:
        return ""
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _decide(path: Path, behavior: Behavior, ask: Callable[[str], str] | None) -> Decision:
    if behavior in ("ask", "skip") and not _has_results(path):
        return Decision.FRESH
    choice: str = behavior
    if behavior == "ask":
        ask = ask or (_ask_person if sys.stdin is not None and sys.stdin.isatty() else None)
        if ask is None:
            raise ConfigError(_nobody_to_ask(path))
        choice = ask(f"{path} holds an earlier run. overwrite, skip or resume? ").strip().lower()
    match choice:
        case "overwrite":
            return Decision.FRESH
        case "skip":
            return Decision.SKIP
        case "resume":
            return Decision.RESUME
        case _:
            raise ConfigError(f"expected overwrite, skip or resume, got {choice!r}; nothing was changed in {path}")
