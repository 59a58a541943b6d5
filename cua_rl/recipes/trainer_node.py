"""Train for a run on another host: `python -m cua_rl.recipes.trainer_node listen=10.0.0.1:29400`.

Starts this node's trainer processes. The run, with `trainer.address=10.0.0.1:29400`, connects to rank 0. The ranks end
with the run; if one dies before, all are started again.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import chz

from cua_rl.command_line.fields import check_numbers, setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.host.processes import OwnedProcess, free_port
from cua_rl.host.users import computing_prefix
from cua_rl.machine.gpus import visible_gpus
from cua_rl.reporting.step_line import num_of
from cua_rl.run_folder.model_folder import fetch_weights, find_model
from cua_rl.training.endpoints import rank_environment
from cua_rl.training.link import TOKEN_VARIABLE, Address, parse_address, require_token
from cua_rl.types.errors import ConfigError, TrainerDeathError

logger = logging.getLogger(__name__)


@chz.chz
class TrainerNodeConfig:
    """One node of a trainer. All settings but `node_rank` are the same on every node."""

    listen: str = setting(doc="address of node 0 at which rank 0 waits for the run, such as 10.0.0.1:29400")
    model_name: str | None = setting(
        None, "folder or hub id of the model that the run trains; None is the included tiny model"
    )
    num_processes: int | None = setting(
        None, "trainer processes of each node; None is one per GPU, one without GPUs", at_least=1
    )
    num_nodes: int = setting(1, "nodes of the trainer", at_least=1)
    node_rank: int = setting(0, "index of this node, from 0", at_least=0)
    rendezvous: str | None = setting(
        None, "with several nodes, another address of node 0, at which the processes meet, such as 10.0.0.1:29500"
    )
    interface: str | None = setting(
        None, "with several nodes, the interface of the private network that connects them, such as eth1"
    )
    max_restarts: int = setting(10, "start the processes again after a death, this many times at most", at_least=0)
    log_file: Path = setting(Path("trainer_node.log"), "file for the output of the processes")

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"node_rank: expected less than num_nodes={self.num_nodes}, got {self.node_rank}")

    @chz.validate
    def _nodes_can_meet(self) -> None:
        for name in ("rendezvous", "interface"):
            if (self.num_nodes > 1) != (getattr(self, name) is not None):
                raise ValueError(f"{name}: expected it with several nodes only, got num_nodes={self.num_nodes}")


async def cli_main(config: TrainerNodeConfig) -> None:
    """Serve one run; returns when it has ended.

    Raises:
        ConfigError: an address, interface or token is missing, or would let anyone in.
        TrainerDeathError: the processes died too often.
    """
    token, listen = require_token(os.environ), parse_address(config.listen, "listen")
    meeting = parse_address(config.rendezvous or f"127.0.0.1:{free_port()}", "rendezvous")
    if str(meeting) == str(listen):
        raise ConfigError(f"rendezvous: expected another port than listen, got {meeting}; choose another one")
    model_path = find_model(config.model_name)
    await asyncio.to_thread(fetch_weights, config.model_name, model_path)
    num_processes = config.num_processes or max(1, len(visible_gpus(os.environ)))
    environment = _environment(config, meeting, token, num_processes)
    command = ["cua_rl.training.launch_ranks", str(num_processes), str(listen), str(model_path)]
    print(
        f"node {config.node_rank} of {config.num_nodes}: {num_processes} trainer processes, log in {config.log_file}; "
        f"the run connects to {listen}, processes meet at {meeting} and talk on {environment['GLOO_SOCKET_IFNAME']}. "
        f"All ask for {TOKEN_VARIABLE}; nothing is encrypted",
        file=sys.stderr,
        flush=True,
    )
    num_deaths = 0
    while True:
        ranks = OwnedProcess(
            [*await asyncio.to_thread(computing_prefix), sys.executable, "-m", *command],
            name="trainer",
            log_path=config.log_file,
            environment=environment,
        )
        async with ranks:
            status = await ranks.wait()
        if status == 0:
            return
        num_deaths += 1
        logger.warning("the trainer processes ended status=%d, death %d", status, num_deaths)
        if num_deaths > config.max_restarts:
            raise TrainerDeathError(
                f"the trainer processes died {num_of(num_deaths, 'time')}; their log ended with:\n{ranks.log_tail()}"
            )


def _environment(config: TrainerNodeConfig, meeting: Address, token: str, num_processes: int) -> dict[str, str]:
    environment = rank_environment(num_processes) | {
        TOKEN_VARIABLE: token,
        "NUM_NODES": str(config.num_nodes),
        "NODE_RANK": str(config.node_rank),
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(meeting.port),
    }
    if config.interface is not None:
        environment |= {"GLOO_SOCKET_IFNAME": config.interface, "NCCL_SOCKET_IFNAME": config.interface}
    return environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(TrainerNodeConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
