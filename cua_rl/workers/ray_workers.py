"""Rollout workers as actors of a Ray cluster. Ray places and starts them; all else is as for workers started by hand.

A worker whose actor cannot be reached any more is given up at once, and one that falls silent after a while. Ray itself
declares a node dead later, and actors there may still answer for seconds: they are refused, like any worker that was
given up.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib import import_module
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from cua_rl.command_line.parsing import make_config
from cua_rl.types.errors import ConfigError

_connecting = Lock()


def make_ray_attempt(settings: Mapping[str, object], secret: Mapping[str, str]) -> Callable[[], Awaitable[str]]:
    """A worker with these settings (`WorkerConfig`) and variables, on the cluster at RAY_ADDRESS or of this machine."""
    return partial(_attempt_actor, dict(settings), dict(secret))


async def _attempt_actor(settings: dict[str, object], secret: dict[str, str]) -> str:
    # untyped for us: the package is there in few installations
    ray: Any = import_module("ray")
    try:
        await asyncio.to_thread(connect, ray)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"workers.launcher: expected a Ray cluster at RAY_ADDRESS or on this machine, got none ({error}); "
            "start one: ray start --head"
        ) from error
    settings["controller"] = reachable(str(settings["controller"]), ray.util.get_node_ip_address())
    host = ray.remote(RayHost).options(num_cpus=1, scheduling_strategy="SPREAD").remote()
    try:
        await host.work.remote(settings, secret)
    except ray.exceptions.RayError as error:
        return f"its actor ended: {str(error).strip().splitlines()[0]}"
    finally:
        ray.kill(host)
    return "its actor ended"


def connect(ray: Any) -> None:
    """Connect to the cluster, once for all workers: of two that connect at once, one fails."""
    with _connecting:
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "auto")
            ray.init(address=address, log_to_driver=False, logging_level="warning")


def reachable(address: str, node: str) -> str:
    """The address for other nodes: a wildcard address means something else there."""
    parts = urlsplit(address)
    if parts.hostname not in ("0.0.0.0", "::"):
        return address
    return parts._replace(netloc=f"[{node}]:{parts.port}" if ":" in node else f"{node}:{parts.port}").geturl()


class RayHost:
    """The worker of a node: it owns gateway, agents and devices there."""

    def work(self, settings: dict[str, object], secret: dict[str, str]) -> None:
        """Work until the run is over."""
        from cua_rl.workers.worker_config import WorkerConfig  # only in the actor: a controller needs neither
        from cua_rl.workers.workplace import run_worker

        os.environ.update(secret)
        asyncio.run(run_worker(make_config(WorkerConfig, settings)))
