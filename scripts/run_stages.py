"""Which stage of a step a training run is in, seen from outside: by its files, and by whether its trainer computes."""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from cua_rl.reporting.json_lines import read_records
from cua_rl.run_folder.log_directory import newest_checkpoint
from scripts.chaos_record import processes_of, read_steps

Stage = Literal["rollouts", "training", "saving", "evaluation"]
STAGES: tuple[Stage, ...] = ("rollouts", "training", "saving", "evaluation")
_LOOK_S = 0.05  # between two looks at the trainer's processor time
_BUSY = 0.4  # of that time


@dataclass
class WatchedRun:
    """A run that evaluates after every `eval_every` steps, and its process."""

    run_folder: Path
    pid: int
    eval_every: int
    _trainer: list[psutil.Process] = field(default_factory=list[psutil.Process])

    def is_in(self, stage: Stage) -> bool:
        """Whether the run is in this stage; blocks for the twentieth of a second.

        Saving begins with a step's adapter and ends with its checkpoint. An asynchronous run is in several stages.
        """
        done, saved = len(read_steps(self.run_folder)), self._saved()
        match stage:
            case "evaluation":
                return done == saved and done > 0 and done % self.eval_every == 0 and not self._is_evaluated(done)
            case "saving":
                return self._newest_adapter() > saved
            case "training":
                return self._computes() and self._newest_adapter() <= self._saved()
            case "rollouts":
                is_evaluated = done % self.eval_every > 0 or self._is_evaluated(done)
                return done == saved and is_evaluated and not self._computes() and self._newest_adapter() <= saved

    def _saved(self) -> int:
        checkpoint = newest_checkpoint(self.run_folder)
        return 0 if checkpoint is None else checkpoint.step

    def _newest_adapter(self) -> int:
        """Steps after which an adapter was or is being written: 000004, .000004.partial-712."""
        names = [path.name.lstrip(".").partition(".")[0] for path in self.run_folder.glob("sampler_weights/*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def _is_evaluated(self, step: int) -> bool:
        records = read_records(self.run_folder / "metrics.jsonl")
        return any(record["step"] == step and any("held_out" in name for name in record) for record in records)

    def _computes(self) -> bool:
        self._trainer = self._trainer or processes_of(self.pid, "cua_rl.training.worker")
        before = self._trainer_s()
        time.sleep(_LOOK_S)
        return self._trainer_s() - before > _BUSY * _LOOK_S

    def _trainer_s(self) -> float:
        spent = 0.0
        for process in self._trainer:
            with suppress(psutil.NoSuchProcess):
                spent += sum(process.cpu_times()[:2])
        return spent
