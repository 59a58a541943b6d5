"""Rollout workers as actors of a Ray cluster. Ray places and starts them; all else is as for workers started by hand.

A worker whose actor cannot be reached any more is given up at once, and one that falls silent after a while. Ray itself
declares a node dead later, and actors there may still answer for seconds: they are refused, like any worker that was
given up.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec
from threading import Lock
from typing import Any, cast
from urllib.parse import urlsplit

from cua_rl.command_line.parsing import make_config
from cua_rl.errors import ConfigError

_connecting = Lock()


def make_ray_attempt(settings: Mapping[str, object], secret: Mapping[str, str]) -> Callable[[], Awaitable[str]]:
    """A worker with these settings (`WorkerConfig`) and variables, on the cluster at RAY_ADDRESS or of this machine."""
    return partial(_attempt_actor, dict(settings), dict(secret))


def require_ray(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless Ray is installed, and its clusters ask for a token."""
    # All nodes of a cluster listen for each other, and run whatever they are sent: without a token, by anybody.
    if environ.get("RAY_AUTH_MODE") not in ("token", "k8s"):
        raise ConfigError(
            f"workers.launcher: expected a Ray cluster that asks for a token, got RAY_AUTH_MODE="
            f"{environ.get('RAY_AUTH_MODE', '')!r}; set it to token on all nodes before `ray start`, and here "
            "(docs/more_machines.md)"
        )
    if find_spec("ray") is None:
        raise ConfigError(
            "workers.launcher: expected the package ray, got none; install it on all nodes (pip install "
            "'cua_rl[ray]'), or start workers by hand"
        )


async def _attempt_actor(settings: dict[str, object], secret: dict[str, str]) -> str:
    # untyped for us: the package is there in few installations
    import ray  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

    ray = cast("Any", ray)
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
    """The address for other nodes: one that stands for all of this node's means something else there."""
    parts = urlsplit(address)
    if parts.hostname not in ("0.0.0.0", "::"):
        return address
    return parts._replace(netloc=f"[{node}]:{parts.port}" if ":" in node else f"{node}:{parts.port}").geturl()


class RayHost:
    """The worker of a node: it owns gateway, agents and devices there."""

    def work(self, settings: dict[str, object], secret: dict[str, str]) -> None:
        """Work until the run is over."""
        from cua_rl.workers.worker_config import WorkerConfig  # in the actor alone: a controller has no use for them
        from cua_rl.workers.workplace import run_worker

        os.environ.update(secret)
        asyncio.run(run_worker(make_config(WorkerConfig, settings)))
