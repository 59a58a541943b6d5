"""Is a checkpoint folder whole? Checked without torch, before anything loads it."""

import json
from hashlib import file_digest
from pathlib import Path
from typing import Any

from cua_rl.errors import ConfigError
from cua_rl.reporting.json_lines import read_records

MANIFEST_NAME = "checkpoint.json"


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None if it is whole.

    A folder with a manifest (`{"files": {name: sha256}}`) must match it; without one, every file must have content, and
    .safetensors files must be as long as their headers say.
    """
    if not folder.is_dir():
        return f"{folder} is missing"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return f"{folder} is empty"
    if (folder / MANIFEST_NAME).is_file():
        return _compare_with_manifest(folder)
    return next((damage for file in files if (damage := _find_file_damage(file))), None)


def find_checkpoint(path: str | None, *, lora_rank: int, lora_alpha: int) -> Path | None:
    """The folder that `load_checkpoint_path` names; raises `ConfigError` for a damaged one or another size."""
    if path is None:
        return None
    folder = Path(path).expanduser().absolute()
    _refuse_run(folder, path)
    damage = find_damage(folder)
    if damage is not None:
        raise ConfigError(
            f"load_checkpoint_path: expected a folder weights/<step> of an earlier run, got {path!r} ({damage}); "
            "look into the checkpoints.jsonl of that run"
        )
    adapter_path = folder / "adapter_config.json"
    adapter: dict[str, Any] = json.loads(adapter_path.read_text(encoding="utf-8")) if adapter_path.is_file() else {}
    rank, alpha = adapter.get("r", 0), adapter.get("lora_alpha", lora_alpha)
    if (rank, alpha) != (lora_rank, lora_alpha):
        raise ConfigError(
            f"load_checkpoint_path: expected weights with lora_rank={lora_rank} lora_alpha={lora_alpha}, got "
            f"lora_rank={rank} lora_alpha={alpha}; set these, or load other weights"
        )
    return folder


def _refuse_run(folder: Path, path: str) -> None:
    """Whoever names a run's folder either wants to go on with that run, or to begin another from its weights."""
    if not (folder / "checkpoints.jsonl").is_file():
        return
    states = [str(record["state_path"]) for record in read_records(folder / "checkpoints.jsonl")]
    newest = next((state for state in reversed(states) if find_damage(folder / state) is None), None)
    fresh = "" if newest is None else f"; to begin another run from its weights, load_checkpoint_path={folder / newest}"
    raise ConfigError(
        f"load_checkpoint_path: expected a folder weights/<step>, got {path!r}, the folder of a run with {len(states)} "
        f"checkpoints; to go on with that run, drop it and set log_path={folder} "
        f"behavior_if_log_dir_exists=resume{fresh}"
    )


def _compare_with_manifest(folder: Path) -> str | None:
    try:
        expected: dict[str, str] = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{folder / MANIFEST_NAME} is not a manifest: {type(error).__name__}: {error}"
    for name, digest in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        with file.open("rb") as stream:
            if file_digest(stream, "sha256").hexdigest() != digest:
                return f"{file} is not what was saved: its sha256 differs from the manifest's"
    return None


def _find_file_damage(file: Path) -> str | None:
    size = file.stat().st_size
    if size == 0:
        return f"{file} is empty"
    if file.suffix == ".safetensors" and size != _safetensors_size(file):
        return f"{file} is cut short"
    return None


def _safetensors_size(file: Path) -> int | None:
    """Length that the header announces: 8 bytes of header length, the JSON header, then the tensors."""
    with file.open("rb") as stream:
        header_length = int.from_bytes(stream.read(8), "little")
        if header_length > file.stat().st_size:
            return None
        try:
            header: dict[str, Any] = json.loads(stream.read(header_length))
        except ValueError:
            return None
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + header_length + max(ends, default=0)
