# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The effect of a training step on the weights: compares checkpoints bit for bit, and updates by direction and size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from cua_rl.training.checkpoint import load_checkpoint
from cua_rl.training.folders import ADAPTER_WEIGHTS
from cua_rl.types.errors import TrainingError

_FIRST_MOMENT, _SECOND_MOMENT = "exp_avg", "exp_avg_sq"  # as torch's AdamW calls them


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two sets of numbers compared one by one."""

    num: int
    """0 if only their hashes were compared."""
    is_equal: bool
    """Bit for bit."""
    largest: float | None
    """Largest difference of two numbers."""
    scale: float | None
    """Largest magnitude."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSize:
    """How the update of another step compares with that of the step taken."""

    norm: float
    relative_norm: float | None
    """As a share of the norm of the update taken; None if that is 0."""
    cosine: float | None
    """Of the angle between both; None if one is 0."""
    gradient_cosine: float | None = None
    """The same of the (clipped) gradients; None with several optimizer steps, whose gradients leave no trace."""


def compare_adapters(one: Path, other: Path) -> Difference:
    """The adapters in two folders; raises `TrainingError` if they have not the same tensors."""
    ours, theirs = (load_file(folder / ADAPTER_WEIGHTS) for folder in (one, other))
    _require_same_names(ours.keys(), theirs.keys())
    return _compare([(ours[name], theirs[name]) for name in ours])


def compare_optimizers(one: Path, other: Path) -> Difference:
    """Both moments and the number of steps of the optimizers of two checkpoints."""
    ours, theirs = (_load(folder)[1] for folder in (one, other))
    _require_same_names(ours.keys(), theirs.keys())
    return _compare([(ours[place][name], theirs[place][name]) for place in ours for name in ours[place]])


def measure_update(before: Path, taken: Path, other: Path, *, beta1: float | None) -> UpdateSize:
    """The update from checkpoint `before` to `other`, beside that to `taken`.

    AdamW's first moment m becomes beta1 m + (1 - beta1) g, which tells the gradient g of a single optimizer step;
    `beta1` is None where there were several.
    """
    weights = [load_file(folder / ADAPTER_WEIGHTS) for folder in (before, taken, other)]
    ours, theirs = ([one[name].double() - weights[0][name] for name in weights[0]] for one in weights[1:])
    norm, norm_taken = _norm(theirs), _norm(ours)
    gradients = None if beta1 is None else [read_gradient(before, after, beta1) for after in (taken, other)]
    return UpdateSize(
        norm=norm,
        relative_norm=norm / norm_taken if norm_taken else None,
        cosine=_cosine(ours, theirs),
        gradient_cosine=None if gradients is None else _cosine(*gradients),
    )


def read_gradient(before: Path, after: Path, beta1: float) -> list[Tensor]:
    """The gradient of the only optimizer step between two checkpoints, as it was clipped."""
    earlier, later = (_load(folder)[1] for folder in (before, after))
    return [
        (moments[_FIRST_MOMENT].double() - beta1 * earlier.get(place, {}).get(_FIRST_MOMENT, 0.0)) / (1 - beta1)
        for place, moments in later.items()
    ]


def _load(folder: Path) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Weights, and the optimizer's moments by the number of their parameter."""
    weights: dict[str, Tensor] = {}
    state = load_checkpoint(folder, lambda path: weights.update(load_file(path / ADAPTER_WEIGHTS)))
    return weights, state.optimizer["state"]


def _require_same_names(ours: Any, theirs: Any) -> None:
    if set(ours) != set(theirs):
        raise TrainingError(f"expected weights of the same names, got others: {sorted(set(ours) ^ set(theirs))[:5]}")


def _compare(pairs: Sequence[tuple[Tensor, Tensor]]) -> Difference:
    return Difference(
        num=sum(one.numel() for one, _ in pairs),
        is_equal=all(one.dtype == other.dtype and _bits(one).equal(_bits(other)) for one, other in pairs),
        largest=max(((one.double() - other.double()).abs().max().item() for one, other in pairs), default=0.0),
        scale=max((one.double().abs().max().item() for one, _ in pairs), default=0.0),
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _norm(tensors: Sequence[Tensor]) -> float:
    return sum(tensor.square().sum().item() for tensor in tensors) ** 0.5


def _cosine(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float | None:
    product = sum((one * other).sum().item() for one, other in zip(ours, theirs, strict=True))
    norms = _norm(ours) * _norm(theirs)
    return product / norms if norms else None
