"""What tests ask of a trainer, and what they look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.rollout import AdapterRef, Datum


@dataclass
class LocalTrainer:
    """The trainer in this process, where a fault can be put into it."""

    trainer: Trainer

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        request = wire.Forward(datums=tuple(datums), temperature=temperature, weights="policy")
        return list(self.trainer.forward(request).training_logprobs)

    async def reference_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        request = wire.Forward(datums=tuple(datums), temperature=temperature, weights="reference")
        return list(self.trainer.forward(request).training_logprobs)

    async def base_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        request = wire.Forward(datums=tuple(datums), temperature=temperature, weights="base")
        return list(self.trainer.forward(request).training_logprobs)

    async def forward_backward(
        self, datums: Sequence[Datum], loss: LossConfig, **beside: Any
    ) -> wire.ForwardBackwardOutput:
        return self.trainer.forward_backward(wire.ForwardBackward(datums=tuple(datums), loss=loss, **beside))

    async def optim_step(self, optim: OptimConfig) -> wire.OptimStepOutput:
        return self.trainer.optim_step(wire.OptimStep(optim=optim))

    async def trainer_metrics(self) -> dict[str, float]:
        return self.trainer.account.take()

    @property
    def policy_version(self) -> int:
        return self.trainer.policy_version

    async def begin_step(self) -> None:
        self.trainer.begin_step()

    async def load_state(self, path: Path, *, with_optimizer: bool = True) -> None:
        self.trainer.load_state(path, with_optimizer=with_optimizer)

    async def load_reference(self, path: Path) -> None:
        self.trainer.model.adapters.load_reference(path)

    async def save_state(self, path: Path) -> None:
        self.trainer.save_state(path)

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef:
        self.trainer.save_weights_for_sampler(path)
        return AdapterRef(path=path, policy_version=self.trainer.policy_version)


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
