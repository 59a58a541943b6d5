"""Configuration of rollout workers: the run's side, and that of a worker which is started by hand."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal

import chz

from cua_rl.command_line.fields import AT_MOST_A_DAY, check_numbers, setting
from cua_rl.run.rollout_config import GatewaySettings
from cua_rl.types.errors import ConfigError

TOKEN_VARIABLE = "ROLLOUT_WORKER_TOKEN"
"""Holds the token with which workers authenticate; a run without it generates one for its own workers."""
MIN_TOKEN_CHARACTERS = 16
"""Minimum length of the token if other machines can connect."""

LINGER_S = 1.0
"""How long events wait to be written together, in a run and its workers, unless a query needs them."""
FLUSH_LINGER_S = 0.1
"""The same in a worker once a rollout has ended: others end at that time too."""


@chz.chz
class WorkerSettings:
    """Processes that run rollouts for the run: devices, agents, gateways (docs/more_machines.md)."""

    launcher: Literal["processes", "ray"] = setting(
        "processes",
        "what starts the workers of rollout_workers: processes on this machine, or actors of a Ray cluster",
    )
    host: str = setting(
        "127.0.0.1", "address at which workers register; other addresses than loopback need ROLLOUT_WORKER_TOKEN"
    )
    port: int | None = setting(
        None,
        "port at which workers that are started by hand register; None allows only those of rollout_workers",
        within=(0, 65535),
    )


@chz.chz
class WorkerConfig:
    """Run rollouts for a training run on another machine or in another process."""

    controller: str = chz.field(doc="address of the run, such as http://trainer:8300 (its workers.host, workers.port)")
    device_slots: int = setting(8, "rollouts at a time, each with its own device", at_least=1)
    name: str | None = setting(None, "name of the worker in logs; None is made of host and process")
    patience_s: float = setting(
        600.0, "how long the controller may be away, for instance until its run is resumed", within=AT_MOST_A_DAY
    )
    gateway: GatewaySettings = chz.field(default_factory=GatewaySettings)

    @chz.validate
    def _values_make_sense(self) -> None:
        check_numbers(self)
        if not self.controller.startswith(("http://", "https://")):
            raise ValueError(f"controller: expected an address such as 'http://trainer:8300', got {self.controller!r}")


def require_ray(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless Ray is installed, and its clusters ask for a token."""
    # Nodes of a cluster listen on the network and run whatever they are sent, without a token by anyone.
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
