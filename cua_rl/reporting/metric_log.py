"""Metrics of a run by step: always metrics.jsonl and TensorBoard, and Weights & Biases if a project is named."""

import logging
import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from cua_rl.metrics import check_names
from cua_rl.reporting.json_lines import append_record
from cua_rl.types.errors import ConfigError

logger = logging.getLogger(__name__)

_WANDB_MODES = ("online", "offline", "disabled", "shared", "run", "dryrun")
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_WANDB_TIMEOUT_S = 15.0  # W&B's own 90 s, and its retries after that, would delay a run for minutes


class _Sink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Writes metrics under their step, where 0 is the baseline; a context manager that closes the files.

    A resumed run continues at `first_step`: TensorBoard drops what an earlier attempt wrote from there on.
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
        self._sinks: list[_Sink] = [_TensorBoard(log_path / "tensorboard", first_step)]
        if wandb_project is not None:
            self._sinks.append(_Wandb(log_path, config, project=wandb_project, name=wandb_name or log_path.name))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `step`; non-finite values are stored as null, with a warning.

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

    def __exit__(self, *error: object) -> None:
        self.close()


class _TensorBoard:
    """Event files through TensorBoard's own pure Python writer: neither torch nor TensorFlow is imported.

    A thread of the writer's own does the disk work. Its libraries load here: they take 0.2 s.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        events: Any = import_module("tensorboard.compat.proto.event_pb2")
        writers: Any = import_module("tensorboard.summary.writer.event_file_writer")
        self._event: Any = events.Event
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        has_earlier = any(folder.glob("events*"))
        self._writer: Any = writers.EventFileWriter(str(folder))
        if has_earlier:
            # a restart mark makes TensorBoard forget events at its step and later; the baseline's, too, in a run that
            # starts over
            restart = events.SessionLog(status=events.SessionLog.START)
            self._writer.add_event(events.Event(step=first_step if first_step > 1 else 0, session_log=restart))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def require_wandb(project: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` if Weights & Biases is asked for and not installed, or could not be logged in to."""
    # Looked up, not imported: that takes seconds.
    if project is None:
        return
    if find_spec("wandb") is None:
        raise ConfigError(
            f"wandb_project: expected the package wandb for it, got none with wandb_project={project!r}; run make "
            "setup, or pip install 'cua_rl[wandb]', or leave wandb_project out"
        )
    mode = environ.get("WANDB_MODE", "online")
    if mode not in _WANDB_MODES:
        raise ConfigError(
            f"WANDB_MODE: expected one of {', '.join(_WANDB_MODES)}, got {mode!r}; correct it, or leave it out"
        )
    is_online = mode in ("online", "run", "shared") and not _wandb_is_switched_off()
    if is_online and not any(environ.get(name) for name in _WANDB_KEYS) and not _has_wandb_login(environ):
        raise ConfigError(
            f"wandb_project: expected a key of Weights & Biases, got none with wandb_project={project!r}; set "
            "WANDB_API_KEY, or log in with `wandb login`, or set WANDB_MODE=offline to keep the run in its folder"
        )


def _wandb_is_switched_off() -> bool:
    """Whether `wandb offline` or `wandb disabled` was run in this folder."""
    path = Path("wandb/settings")
    return path.is_file() and re.search(r"^\s*mode\s*=\s*(offline|disabled|dryrun)", path.read_text(), re.M) is not None


def _has_wandb_login(environ: Mapping[str, str]) -> bool:
    """Whether `wandb login` has left a key for the host, in the file of logins that curl reads too."""
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    home = Path(environ.get("HOME") or "~").expanduser()
    for path in [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]:
        try:
            if netrc(str(path)).authenticators(host):
                return True
        except (OSError, NetrcParseError):
            continue
    return False


class _Wandb:
    def __init__(self, folder: Path, config: Mapping[str, object], *, project: str, name: str) -> None:
        require_wandb(project)
        wandb: Any = import_module("wandb")
        os.environ.pop("WANDB_SERVICE", None)  # of the program that started the run: others can read what it writes
        settings = wandb.Settings(init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", _WANDB_TIMEOUT_S)))
        # the name doubles as id: a resumed run continues in its own charts
        identity = {"project": project, "name": name, "id": name, "resume": "allow"}
        try:
            self._run: Any = wandb.init(**identity, dir=str(folder), config=dict(config), settings=settings)
        except wandb.Error as error:
            raise ConfigError(
                f"expected Weights & Biases to open project {project!r}, got {str(error)!r}; set WANDB_API_KEY, or "
                "WANDB_MODE=offline to keep the run in its folder"
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
