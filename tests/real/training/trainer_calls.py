"""What tests ask of a trainer, and what they look at."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.rollout import Datum

LOSS = LossConfig(name="importance_sampling")
STEP = wire.OptimStep(optim=OptimConfig(learning_rate=1e-2))


def forward(trainer: Trainer, datums: Sequence[Datum], temperature: float = 1.0) -> list[Tensor]:
    request = wire.Forward(datums=tuple(datums), temperature=temperature, weights="policy")
    return [torch.tensor(row) for row in trainer.forward(request).training_logprobs]


def train(trainer: Trainer, datums: Sequence[Datum], loss: LossConfig = LOSS) -> wire.ForwardBackwardOutput:
    return trainer.forward_backward(wire.ForwardBackward(datums=tuple(datums), loss=loss))


def gradients(trainer: Trainer) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trainer.model.trainable_parameters]


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.trainable_parameters]


def moved(trainer: Trainer, datums: Sequence[Datum]) -> Trainer:
    """The trainer after a step, so that the adapter does something."""
    train(trainer, datums)
    trainer.optim_step(STEP)
    return trainer


def run_out_of_memory(trainer: Trainer, *, above: int) -> None:
    """Let the device have no memory for rows of more tokens, as the allocator of a GPU says it."""

    def refuse(_: object, args: object, kwargs: dict[str, Tensor]) -> None:
        if kwargs["inputs_embeds"].shape[1] > above:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer.model.base.model.language_model.register_forward_pre_hook(refuse, with_kwargs=True)
