"""A trainer process: serves requests, ends with the connection.

`python -m cua_rl.training.worker SOCKET` connects to the controller of this machine, which listens there. With
`HOST:PORT` instead, rank 0 listens for a controller on another host; MODEL, if it follows, is the model's folder here.
RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE make it one of several, MASTER_ADDR and MASTER_PORT let several nodes
meet: torchrun sets them too.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils.logging import disable_progress_bar

from cua_rl.command_line.fields import with_values
from cua_rl.host.system import refuse_inspection
from cua_rl.training import wire
from cua_rl.training.folders import read_files, write_files
from cua_rl.training.libraries import require_libraries
from cua_rl.training.link import Address, WorkerLink, parse_address, require_token
from cua_rl.training.ranks import Meeting, Place, Ranks, combine_accounts
from cua_rl.training.trainer import Trainer
from cua_rl.types.codec import decode
from cua_rl.types.errors import ConfigError, CuaError, DiskFullError, TrainingError, boundary

logger = logging.getLogger(__name__)

_INTERFACE = "GLOO_SOCKET_IFNAME"


def main(arguments: list[str]) -> int:
    """Serve one controller until it closes the connection."""
    refuse_inspection()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    disable_progress_bar()
    place = Place.from_environment(os.environ)
    if arguments[0].startswith("/"):
        socket_path = Path(arguments[0])
        serve_ranks(Ranks.meet(socket_path.parent, place), lambda: _call(socket_path))
        return 0
    try:
        address, token = parse_address(arguments[0], "ADDRESS"), require_token(os.environ)
        meeting = find_meeting(os.environ, token, place)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    model = Path(arguments[1]) if len(arguments) > 1 else None
    serve_ranks(Ranks.meet(meeting, place), lambda: _wait_for_call(address, token), model)
    return 0


def find_meeting(environ: Mapping[str, str], token: str, place: Place) -> Meeting | None:
    """Where the ranks meet; None for a single one.

    Raises:
        ConfigError: no place to meet, or no interface to talk on, is given.
    """
    if place.size == 1:
        return None
    master = parse_address(f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}", "MASTER_ADDR, MASTER_PORT")
    if not environ.get(_INTERFACE):
        raise ConfigError(
            f"{_INTERFACE}: expected the interface of the private network on which the ranks talk to each other, such "
            "as eth1, got none; set it"
        )
    logger.info("ranks talk on interface=%s, meet at %s; nothing is encrypted", environ[_INTERFACE], master)
    is_served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = int(environ["TORCHELASTIC_RESTART_COUNT"]) if is_served else None
    return Meeting(host=master.host, port=master.port, token=token, torchrun_attempt=attempt)


def _call(socket_path: Path) -> WorkerLink:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(socket_path))
    return WorkerLink(connection)


def _wait_for_call(address: Address, token: str) -> WorkerLink:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.create_server((address.host, address.port), family=family) as listener:
        logger.info("rank 0 listens at %s for a controller with the token; nothing is encrypted", address)
        return WorkerLink.accept(listener, token)


def serve_ranks(ranks: Ranks, connect: Callable[[], WorkerLink], model: Path | None = None) -> None:
    """Rank 0 connects to the controller and passes its requests on to the others."""
    if ranks.rank == 0:
        serve(connect(), ranks, model)
    else:
        follow(ranks, model)
    ranks.close()


def serve(link: WorkerLink, ranks: Ranks, model: Path | None) -> None:
    """Answer requests; a request that fails is answered with `Failed` and leaves the weights unchanged.

    Returns when the controller closes the connection. If it breaks, the run may still be there: this process fails, so
    that its node starts the ranks again and the run finds them.
    """
    worker = _Worker(ranks, model)
    while True:
        with ranks.together():
            request = _receive(link)
        ranks.next_request(request)
        if not request:
            return
        reply = worker.reply(request)
        with ranks.together(), suppress(BrokenPipeError):  # it closed the connection, as the next read says
            link.send(reply)


def _receive(link: WorkerLink) -> bytearray:
    """The next request, or nothing if the controller has closed the connection."""
    try:
        return link.receive()
    except EOFError as error:
        logger.info("the controller is gone: %s", error)
        return bytearray()


def follow(ranks: Ranks, model: Path | None) -> None:
    """Carry out the requests of rank 0 on another rank; its replies are discarded."""
    worker = _Worker(ranks, model)
    while request := ranks.next_request(bytearray()):
        worker.reply(request)


class _Worker:
    """Carries out requests; there is no trainer before `Start`."""

    def __init__(self, ranks: Ranks, model: Path | None) -> None:
        self._ranks = ranks
        self._model = model
        self._trainer: Trainer | None = None

    def reply(self, payload: bytearray) -> wire.Reply:
        """The answer; `Failed` if the request is malformed or cannot be carried out."""
        name = "request"
        try:
            request: wire.Request = decode(payload, wire.Request)
            name = type(request).__name__
            with boundary(TrainingError, f"trainer, {name}"):
                if isinstance(request, wire.WithFiles):
                    return self._carry_out_with_files(request)
                if not isinstance(request, wire.Start):
                    return self._carry_out(request)
                config = request.config
                require_libraries(config.loader, config.kernels, has_gpu=torch.cuda.is_available())
                if self._model is not None:
                    config = with_values(config, model_path=self._model)
                self._trainer = trainer = Trainer(config, self._ranks)
                num_parameters = sum(parameter.numel() for parameter in trainer.model.base.parameters())
                num_trainable = sum(parameter.numel() for parameter in trainer.model.trainable_parameters)
                device = str(trainer.model.device)
                logger.info(
                    "trainer ready device=%s attention=%s parameters=%d trainable=%d",
                    *(device, trainer.model.attention_kernel, num_parameters, num_trainable),
                )
                return wire.Started(device=device, num_trainable_parameters=num_trainable)
        except CuaError as error:
            logger.exception("failed request=%s", name)
            is_full = isinstance(error, DiskFullError)
            kind = "config" if isinstance(error, ConfigError) else "disk" if is_full else "training"
            return wire.Failed(kind=kind, message=str(error))

    def _carry_out_with_files(self, request: wire.WithFiles) -> wire.Reply:
        with TemporaryDirectory() as name:
            folder = Path(name) / "folder"
            if request.files:
                write_files(folder, request.files)
            reply = self._carry_out(replace(request.request, path=folder))
            assert isinstance(reply, wire.Done)
            return wire.FilesOutput(reply=reply, files={} if request.files else read_files(folder))

    def _carry_out(self, request: wire.Request) -> wire.Reply:
        trainer = self._trainer
        if trainer is None:
            raise TrainingError(f"expected Start as the first request, got {type(request).__name__}")
        if isinstance(request, wire.TrainerMetrics):
            accounts = self._ranks.gather(trainer.account.take(), dict[str, float])
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
