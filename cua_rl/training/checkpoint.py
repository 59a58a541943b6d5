# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Checkpoints: folders that are either complete or absent, with checksums that reveal damage."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from cua_rl.training.folders import file_sha256, write_folder
from cua_rl.types.errors import TrainingError

_MANIFEST = "checkpoint.json"
_STATE = "trainer_state.pt"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Everything except the weights that the next step depends on."""

    policy_version: int
    optimizer: dict[str, Any]
    rng: list[torch.Tensor]
    """Random-generator states: the CPU's, then every CUDA device's."""


def save_checkpoint(path: Path, state: TrainerState, save_weights: Callable[[Path], None]) -> None:
    """Write weights, optimizer and random state, and a manifest with the sha256 of every file."""

    def write(folder: Path) -> None:
        save_weights(folder)
        contents = {"policy_version": state.policy_version, "optimizer": state.optimizer, "rng": state.rng}
        with (folder / _STATE).open("wb") as file:  # given a path, PyTorch does not say that the disk is full
            torch.save(contents, file)
        written = sorted(file for file in folder.rglob("*") if file.is_file())
        files = {str(file.relative_to(folder)): file_sha256(file) for file in written}
        manifest = {"format": _FORMAT, "policy_version": state.policy_version, "files": files}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2))

    write_folder(path, write)


def load_checkpoint(path: Path, load_weights: Callable[[Path], None]) -> TrainerState:
    """Check every file, then load; raises `TrainingError` before anything changes if a file is missing or damaged."""
    if not (path / _MANIFEST).is_file():
        raise TrainingError(f"expected a checkpoint (a folder with {_MANIFEST}) at {str(path)!r}, found none")
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
    except ValueError as error:
        raise TrainingError(f"checkpoint {str(path)!r} is damaged: {_MANIFEST} is not JSON: {error}") from error
    if manifest.get("format") != _FORMAT:
        raise TrainingError(f"expected checkpoint format {_FORMAT} at {str(path)!r}, got {manifest.get('format')!r}")
    for name, expected in manifest["files"].items():
        actual = file_sha256(path / name) or "no file"
        if actual != expected:
            raise TrainingError(
                f"checkpoint {str(path)!r} is damaged: expected {name} with sha256 {expected}, got {actual}; "
                "resume from an older checkpoint"
            )
    contents = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    load_weights(path)
    return TrainerState(**contents)


def gather_whole(tensor: Tensor, *, keep: bool) -> Tensor:
    """All of a tensor of which each rank holds a shard, in main memory; nothing on ranks that do not keep it."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor().detach()
    return whole.cpu() if keep else torch.empty(0)


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a tensor, if `like` is sharded."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Whole tensors and sharded ones, if there are any: PyTorch's fused operations do not take both at once."""
    kinds = [[one for one in tensors if isinstance(one, DTensor) is is_sharded] for is_sharded in (False, True)]
    return [kind for kind in kinds if kind]


def gather_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], *, keep: bool
) -> dict[str, Any]:
    """The state as that of one process, whose optimizer has one group with all `parameters` in their order."""
    state = optimizer.state_dict()
    places = _places(optimizer, parameters)
    moments = {
        places[index]: {name: gather_whole(value, keep=keep) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {"state": moments, "param_groups": [{**state["param_groups"][0], "params": list(range(len(places)))}]}


def load_optimizer(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], whole: dict[str, Any]) -> None:
    """Continue from what `gather_optimizer` returned, with this rank's shards."""
    state = {
        index: {
            name: shard_like(value, parameters[place]) if value.ndim else value
            for name, value in whole["state"][place].items()
        }
        for index, place in enumerate(_places(optimizer, parameters))
        if place in whole["state"]
    }
    groups = [
        {**whole["param_groups"][0], "params": group["params"]} for group in optimizer.state_dict()["param_groups"]
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _places(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[int]:
    """Where the optimizer's parameters, one group after the other, are among `parameters`."""
    numbers = {id(parameter): place for place, parameter in enumerate(parameters)}
    return [numbers[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
