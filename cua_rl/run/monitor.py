"""The monitor process that a run starts, and the connection to a remote monitor."""

import fcntl
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from cua_rl.database.screenshots import STORE_VARIABLE
from cua_rl.events import Recorder
from cua_rl.host.masking import is_secret_name
from cua_rl.host.processes import OwnedProcess, free_port
from cua_rl.monitor.sender import MonitorAddress, SendingRecorder
from cua_rl.run.training_config import MonitorSettings
from cua_rl.types.errors import ConfigError, boundary

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8720


def find_monitor(settings: MonitorSettings, environ: Mapping[str, str] = os.environ) -> MonitorAddress | None:
    """Where the run is to be sent, by settings or environment, None for nowhere; raises `ConfigError`."""
    base_url = settings.base_url or environ.get("MONITOR_BASE_URL") or None
    if base_url is None:
        # a project named in the settings needs it; one that is only in the environment may serve other programs
        for name, value in (("project_token", settings.project_token), ("project_id", settings.project_id)):
            if value:
                raise ConfigError(
                    f"{name}: expected monitor.base_url, the address of the monitor that has the project, beside it, "
                    f"got none; set monitor.base_url=https://… (or MONITOR_BASE_URL), or drop {name}"
                )
        return None
    with boundary(ConfigError, f"monitor.base_url: expected an address, got {base_url!r}; correct or drop it"):
        parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"monitor.base_url: expected the address of a monitor (https://…), got {base_url!r}; correct or drop it"
        )
    token = settings.project_token or environ.get("MONITOR_PROJECT_TOKEN") or environ.get("PROJECT_TOKEN")
    if not token:
        raise ConfigError(
            "project_token: expected the token of a project beside monitor.base_url, got none; make one there with "
            "`python -m cua_rl.recipes.serve_monitor DATABASE_URL create_project=NAME` and set MONITOR_PROJECT_TOKEN"
        )
    project_id = settings.project_id or environ.get("PROJECT_ID") or None
    return MonitorAddress(base_url=base_url, token=token, project_id=project_id)


def spool_folder(folder: Path) -> Path:
    """Folder of events not yet delivered to the remote monitor."""
    return folder / "monitor_spool"


async def send_events(
    stack: AsyncExitStack, recorder: Recorder, address: MonitorAddress | None, folder: Path, image_token_id: int
) -> Recorder:
    """The recorder, sending to another monitor too if there is one."""
    if address is None:
        return recorder
    sender = SendingRecorder(recorder, address, spool_folder(folder), image_token_id=image_token_id)
    return await stack.enter_async_context(sender)


async def show_run(stack: AsyncExitStack, settings: MonitorSettings, database_url: str, folder: Path) -> str | None:
    """Start a monitor of the run's database, which stops with the run; returns its address, or None if disabled.

    If it cannot start or dies, training continues.
    """
    if not settings.show:
        return None
    port = settings.port or _choose_port(stack)
    command = [sys.executable, "-m", "cua_rl.recipes.serve_monitor", f"port={port}"]
    if shutil.which("nice"):
        command = ["nice", "-n", "10", *command]  # training comes first
    # it needs its own tokens, and no key of a judge, a device or a hub
    needed = {name: value for name, value in os.environ.items() if not is_secret_name(name) or _is_for_monitor(name)}
    environment = {**needed, "DATABASE_URL": database_url}
    log_path = folder / "logs" / "monitor.log"
    process = OwnedProcess(command, name="monitor", log_path=log_path, environment=environment, stop_timeout_s=3.0)
    await stack.enter_async_context(process)
    return f"http://127.0.0.1:{port}"


def _is_for_monitor(name: str) -> bool:
    of_store = ("AWS_", "AZURE_", "GOOGLE_", "FSSPEC_") if os.environ.get(STORE_VARIABLE) else ()
    return name.startswith(("MONITOR_READ_", "MONITOR_WRITE_", "PG", *of_store))


def _choose_port(stack: AsyncExitStack) -> int:
    """The default port if it is free and no run that has just started took it, else any."""
    claim = Path(__file__).open("rb")  # noqa: SIM115 - its monitor listens a moment later
    stack.callback(claim.close)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return free_port()
    except OSError as error:
        logger.debug("no lock on a file that was opened for reading, as on NFS: %s", error)
    try:
        return free_port(DEFAULT_PORT)
    except OSError:
        return free_port()
