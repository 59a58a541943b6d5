# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Checkpoints: folders that are either complete or absent, with checksums that reveal damage."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch

from cua_rl.errors import TrainingError
from cua_rl.training.folders import write_folder

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
        torch.save(contents, folder / _STATE)
        files = {str(file.relative_to(folder)): _sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}
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
        raise TrainingError(f"checkpoint {str(path)!r} is damaged: {_MANIFEST} is no JSON: {error}") from error
    if manifest.get("format") != _FORMAT:
        raise TrainingError(f"expected checkpoint format {_FORMAT} at {str(path)!r}, got {manifest.get('format')!r}")
    for name, expected in manifest["files"].items():
        file = path / name
        actual = _sha256(file) if file.is_file() else "no file"
        if actual != expected:
            raise TrainingError(
                f"checkpoint {str(path)!r} is damaged: expected {name} with sha256 {expected}, got {actual}; "
                "resume from an older checkpoint"
            )
    contents = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    load_weights(path)
    return TrainerState(**contents)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()
