"""The trainer process, `python -m cua_rl.training.worker SOCKET`: serves requests, ends with the connection."""

import logging
import socket
import sys

from transformers.utils.logging import disable_progress_bar

from cua_rl.errors import ConfigError, CuaError, TrainingError, boundary
from cua_rl.training import wire
from cua_rl.training.trainer import Trainer

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Serve the controller that listens at the given unix socket until it closes the connection."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    disable_progress_bar()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(arguments[0])
        serve(connection)
    return 0


def serve(connection: socket.socket) -> None:
    """Answer requests; a request that fails is answered with `Failed` and leaves the weights as they were."""
    trainer: Trainer | None = None
    while True:
        try:
            request: wire.Request = wire.receive(connection)
        except EOFError:
            return
        try:
            with boundary(TrainingError, f"trainer, {type(request).__name__}"):
                if isinstance(request, wire.Start):
                    trainer = Trainer(request.config)
                    reply = _started(trainer)
                elif trainer is None:
                    raise TrainingError(f"expected Start as the first request, got {type(request).__name__}")
                elif isinstance(request, wire.TakeAccount):
                    reply = wire.AccountOutput(metrics=trainer.account.take())
                else:
                    with trainer.account.busy():
                        reply = _answer(trainer, request)
        except CuaError as error:
            logger.exception("failed request=%s", type(request).__name__)
            kind = "config" if isinstance(error, ConfigError) else "training"
            reply = wire.Failed(kind=kind, message=str(error))
        wire.send(connection, reply)


def _answer(trainer: Trainer, request: wire.Request) -> wire.Reply:
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
        case wire.SaveWeightsForSampler(path=path):
            trainer.save_weights_for_sampler(path)
        case wire.Start() | wire.TakeAccount():
            raise TrainingError("expected one Start per process, got another")
    return wire.Done(policy_version=trainer.policy_version)


def _started(trainer: Trainer) -> wire.Started:
    parameters = list(trainer.model.base.parameters())
    started = wire.Started(
        device=str(trainer.model.device),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable_parameters=sum(parameter.numel() for parameter in trainer.model.trainable_parameters),
    )
    logger.info(
        "trainer ready device=%s parameters=%d trainable=%d",
        started.device,
        started.num_parameters,
        started.num_trainable_parameters,
    )
    return started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
