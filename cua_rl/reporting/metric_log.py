"""Metrics of a run, step by step: metrics.jsonl and TensorBoard always, Weights & Biases when a project is named."""

import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from cua_rl.errors import ConfigError
from cua_rl.metrics import check_names
from cua_rl.reporting.json_lines import append_record
from cua_rl.reporting.tensorboard_files import TensorBoardFiles

logger = logging.getLogger(__name__)


class _Sink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Writes metrics under their step, 0 being the baseline; a context manager that closes the files.

    A resumed run goes on with `first_step`: TensorBoard drops what an earlier attempt wrote of it and later steps.
    """

    def __init__(
        self,
        log_path: Path,
        *,
        config: Mapping[str, object],
        first_step: int = 1,
        wandb_project: str | None = None,
        wandb_name: str | None = None,
    ) -> None:
        self.path = log_path / "metrics.jsonl"
        self._sinks: list[_Sink] = [TensorBoardFiles(log_path / "tensorboard", first_step)]
        if wandb_project is not None:
            self._sinks.append(_Wandb(log_path, config, project=wandb_project, name=wandb_name or log_path.name))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of `step`; values that are not finite are stored as null, with a warning.

        Raises:
            ValueError: `cua_rl/metrics.py` does not know a name.
        """
        check_names(metrics)
        broken = [name for name, value in metrics.items() if not isfinite(value)]
        if broken:
            logger.warning("metrics are not finite step=%s names=%s", step, broken)
        plain = {name: None if name in broken else float(value) for name, value in metrics.items()}
        append_record(self.path, {"step": step} | plain)
        finite = {name: float(value) for name, value in metrics.items() if name not in broken}
        for sink in self._sinks:
            sink.write(step, finite)

    def close(self) -> None:
        """Write out what is buffered."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_wandb(project: str | None) -> None:
    """Raise `ConfigError` if Weights & Biases is asked for and not installed."""
    if project is not None and find_spec("wandb") is None:  # looked up, not imported: that takes seconds
        raise ConfigError(
            f"wandb_project: expected the package wandb for it, got none with wandb_project={project!r}; run make "
            "setup, or pip install 'cua_rl[wandb]', or leave wandb_project out"
        )


class _Wandb:
    def __init__(self, folder: Path, config: Mapping[str, object], *, project: str, name: str) -> None:
        require_wandb(project)
        wandb: Any = import_module("wandb")
        try:
            # the name doubles as id: a resumed run goes on in its own charts
            self._run: Any = wandb.init(
                project=project, name=name, id=name, resume="allow", dir=str(folder), config=dict(config)
            )
        except wandb.Error as error:
            raise ConfigError(
                f"expected Weights & Biases to open project {project!r}, got {str(error)!r}; set WANDB_API_KEY, or "
                "WANDB_MODE=offline to keep the run in its folder"
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
