"""The trainer process: serves requests, ends with the connection.

`python -m cua_rl.training.worker SOCKET` is the only one; with `RANK SIZE` behind, one of several.
"""

import logging
import socket
import sys
from pathlib import Path
from typing import cast

from transformers.utils.logging import disable_progress_bar

from cua_rl.errors import ConfigError, CuaError, TrainingError, boundary
from cua_rl.training import wire
from cua_rl.training.ranks import Ranks, combine_accounts
from cua_rl.training.trainer import Trainer

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Serve the controller that listens at the given unix socket until it closes the connection."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    disable_progress_bar()
    socket_path = Path(arguments[0])
    rank, size = map(int, arguments[1:] or (0, 1))
    ranks = Ranks.meet(socket_path.parent, rank, size)
    if ranks.rank == 0:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(socket_path))
            serve(connection, ranks)
    else:
        follow(ranks)
    ranks.close()
    return 0


def serve(connection: socket.socket, ranks: Ranks) -> None:
    """Answer requests; a request that fails is answered with `Failed` and leaves the weights unchanged."""
    worker = _Worker(ranks)
    while True:
        try:
            request: wire.Request | None = wire.receive(connection)
        except EOFError:
            request = None
        ranks.next_request(request)
        if request is None:
            return
        wire.send(connection, worker.reply(request))


def follow(ranks: Ranks) -> None:
    """Carry out the requests of rank 0 on another rank; its replies are discarded."""
    worker = _Worker(ranks)
    while (request := cast("wire.Request | None", ranks.next_request(None))) is not None:
        worker.reply(request)


class _Worker:
    """Carries out requests; there is no trainer before `Start`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._trainer: Trainer | None = None

    def reply(self, request: wire.Request) -> wire.Reply:
        """The answer; `Failed` if the request cannot be carried out."""
        try:
            with boundary(TrainingError, f"trainer, {type(request).__name__}"):
                if not isinstance(request, wire.Start):
                    return self._carry_out(request)
                self._trainer = trainer = Trainer(request.config, self._ranks)
                num_parameters = sum(parameter.numel() for parameter in trainer.model.base.parameters())
                num_trainable = sum(parameter.numel() for parameter in trainer.model.trainable_parameters)
                device = str(trainer.model.device)
                logger.info("trainer ready device=%s parameters=%d trainable=%d", device, num_parameters, num_trainable)
                return wire.Started(
                    device=device, num_parameters=num_parameters, num_trainable_parameters=num_trainable
                )
        except CuaError as error:
            logger.exception("failed request=%s", type(request).__name__)
            kind = "config" if isinstance(error, ConfigError) else "training"
            return wire.Failed(kind=kind, message=str(error))

    def _carry_out(self, request: wire.Request) -> wire.Reply:
        trainer = self._trainer
        if trainer is None:
            raise TrainingError(f"expected Start as the first request, got {type(request).__name__}")
        if isinstance(request, wire.TrainerMetrics):
            accounts = self._ranks.gather(trainer.account.take())
            return wire.TrainerMetricsOutput(metrics=combine_accounts(accounts))
        with trainer.account.busy():
            match request:
                case wire.Forward():
                    return trainer.forward(request)
                case wire.ForwardBackward():
                    return trainer.forward_backward(request)
                case wire.OptimStep():
                    return trainer.optim_step(request)
                case wire.SaveState(path=path):
                    trainer.save_state(path)
                case wire.LoadState(path=path, with_optimizer=with_optimizer):
                    trainer.load_state(path, with_optimizer=with_optimizer)
                case wire.LoadReference(path=path):
                    trainer.model.load_reference(path)
                case wire.SaveWeightsForSampler(path=path, probe=probe):
                    trainer.save_weights_for_sampler(path, probe)
                case _:
                    raise AssertionError(f"expected Start to be carried out by reply, got {request!r}")
        return wire.Done(policy_version=trainer.policy_version)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
