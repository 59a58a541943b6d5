"""A trainer process: serves requests, ends with the connection: `python -m cua_rl.training.worker SOCKET`.

Rank 0 connects to whoever started it, who listens at SOCKET; the ranks of one machine meet in its folder. RANK,
WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE make this process one of several; `launch_ranks.py` has the variables of
those on several machines.
"""

import logging
import os
import socket
import sys
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
from cua_rl.training.launch_ranks import MODEL_VARIABLE
from cua_rl.training.libraries import require_libraries
from cua_rl.training.link import WorkerLink
from cua_rl.training.ranks import Meeting, Place, Ranks, combine_accounts
from cua_rl.training.trainer import Trainer
from cua_rl.types.codec import decode
from cua_rl.types.errors import ConfigError, CuaError, DiskFullError, TrainingError, boundary

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Serve one controller until it closes the connection."""
    refuse_inspection()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    disable_progress_bar()
    socket_path, model = Path(arguments[0]), os.environ.get(MODEL_VARIABLE)
    where = Meeting.from_environment(os.environ) or socket_path.parent
    ranks = Ranks.meet(where, Place.from_environment(os.environ))
    if ranks.rank == 0:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(socket_path))
            serve(WorkerLink(connection), ranks, model)
    else:
        follow(ranks, model)
    ranks.close()
    return 0


def serve(link: WorkerLink, ranks: Ranks, model: str | None) -> None:
    """Answer requests; a request that fails is answered with `Failed` and leaves the weights unchanged.

    Returns when the controller closes the connection.
    """
    worker = _Worker(ranks, model)
    while True:
        with ranks.together():
            request = link.receive()
        ranks.next_request(request)
        if not request:
            return
        reply = worker.reply(request)
        with ranks.together(), suppress(BrokenPipeError):  # it closed the connection, as the next read says
            link.send(reply)


def follow(ranks: Ranks, model: str | None) -> None:
    """Carry out the requests of rank 0 on another rank; its replies are discarded."""
    worker = _Worker(ranks, model)
    while request := ranks.next_request(bytearray()):
        worker.reply(request)


class _Worker:
    """Carries out requests; there is no trainer before `Start`."""

    def __init__(self, ranks: Ranks, model: str | None) -> None:
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
                if not isinstance(request, wire.Start):
                    return self._carry_out_for_model(request)
                config = request.config
                require_libraries(config.loader, config.kernels, has_gpu=torch.cuda.is_available())
                if self._model is not None:
                    config = with_values(config, model_path=Path(self._model))
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

    def _carry_out_for_model(self, request: wire.Request) -> wire.Reply:
        if self._trainer is None:
            raise TrainingError(f"expected Start as the first request, got {type(request).__name__}")
        model, inner = (request.model, request.request) if isinstance(request, wire.ForModel) else ("", request)
        self._trainer.models.use(model)
        if isinstance(inner, wire.WithFiles):
            return self._carry_out_with_files(self._trainer, inner)
        return self._carry_out(self._trainer, inner)

    def _carry_out_with_files(self, trainer: Trainer, request: wire.WithFiles) -> wire.Reply:
        with TemporaryDirectory() as name:
            folder = Path(name) / "folder"
            if request.files:
                write_files(folder, request.files)
            reply = self._carry_out(trainer, replace(request.request, path=folder))
            assert isinstance(reply, wire.Done)
            return wire.FilesOutput(reply=reply, files={} if request.files else read_files(folder))

    def _carry_out(self, trainer: Trainer, request: wire.Request) -> wire.Reply:
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
                case _:
                    _keep(trainer, request)
        return wire.Done(policy_version=trainer.policy_version)


def _keep(trainer: Trainer, request: wire.Request) -> None:
    """Requests about which models and folders there are."""
    match request:
        case wire.BeginStep():
            trainer.begin_step()
        case wire.SaveState(path=path):
            trainer.save_state(path)
        case wire.LoadState(path=path, with_optimizer=with_optimizer):
            trainer.load_state(path, with_optimizer=with_optimizer)
        case wire.LoadReference(path=path):
            trainer.model.adapters.load_reference(path)
        case wire.SaveWeightsForSampler(path=path, probe=probe):
            trainer.save_weights_for_sampler(path, probe)
        case wire.CreateModel(model=model, spec=spec):
            trainer.models.create(model, spec)
        case wire.DropModel(model=model):
            trainer.models.drop(model)
        case _:
            raise AssertionError(f"expected Start to be carried out by reply, got {request!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
