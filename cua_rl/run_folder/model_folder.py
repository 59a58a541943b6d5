"""Finds a model's files: in a folder, the hub's cache, on the hub, or the tiny model of this package."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.families import FAMILIES, LoraModule
from cua_rl.renderers.images import require_pixel_statistics
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.run_folder.checkpoints import find_file_damage
from cua_rl.types.errors import ConfigError, boundary

HUB_TIMEOUT_S = 3.0
LONGEST_BY_DEFAULT = 16384
_COMPILING_S, _SLOW_DISK_BYTES_PER_S = 600.0, 50e6
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_SETTINGS_FILES: tuple[str, ...] = ("*.json", "*.jinja", "*.txt")
_NEEDED_FILES = ("config.json", "tokenizer.json")


def find_model(name: str | None) -> Path:
    """The folder of the model `name`; None is the tiny model. The weights of a hub model may not be downloaded yet.

    A hub model's revision may follow its name: org/name@v1. What has been downloaded of it is not asked for again.
    Raises `ConfigError` if there is no such model, before anything is loaded.
    """
    if name is None:
        return TINY_QWEN3_VL
    folder = Path(name).expanduser()
    with boundary(ConfigError, f"model_name: expected a folder that can be read, got {name!r}; check its permissions"):
        if folder.exists():
            folder = folder.absolute()
            missing = [file for file in _NEEDED_FILES if not (folder / file).is_file()]
            if missing:
                raise ConfigError(
                    f"model_name: expected a model folder with config.json and tokenizer.json, got {name!r} without "
                    f"{' and '.join(missing)}; name the folder of a checkpoint such as Qwen3-VL's"
                )
            _require_readable(folder, name)
            if not _has_weights(folder):
                raise ConfigError(
                    f"model_name: expected a model folder with all its weights (.safetensors), got {name!r} without; "
                    "download the whole model"
                )
            return folder
    # imported here: that takes 0.3 s, and most runs name a folder
    from huggingface_hub import HfApi, snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import LocalEntryNotFoundError

    problem = (
        f"model_name: expected a folder, or a model of the hub that can be reached, got {name!r}; "
        "check the spelling, or download the model and name its folder"
    )
    repository, _, revision = name.partition("@")
    commit: str | None = revision or None
    wanted: list[str] = [*_SETTINGS_FILES]
    with boundary(ConfigError, problem):
        try:
            kept = Path(snapshot_download(repository, revision=commit, local_files_only=True, allow_patterns=wanted))
            if all((kept / file).is_file() for file in _NEEDED_FILES):
                return kept
            commit = kept.name  # another program has kept some of its files
        except LocalEntryNotFoundError:
            HfApi().model_info(repository, revision=commit, timeout=HUB_TIMEOUT_S)
        return Path(snapshot_download(repository, revision=commit, allow_patterns=wanted))


def absolute_if_folder(name: str | None) -> str | None:
    """The name for processes that work in another folder."""
    folder = None if name is None else Path(name).expanduser()
    return str(folder.absolute()) if folder is not None and folder.exists() else name


def pinned_name(name: str | None, model_path: Path) -> str | None:
    """The name with the commit that `find_model` found on the hub, such as Qwen/Qwen3-VL-4B-Instruct@COMMIT."""
    if name is None or model_path.parent.name != "snapshots" or Path(name).expanduser().exists():
        return name
    return f"{repository_of(name)}@{model_path.name}"


def repository_of(name: str) -> str:
    """The name of a model without its revision."""
    return name.partition("@")[0]


def _require_readable(folder: Path, name: str) -> None:
    """Raise `ConfigError` for files that are cut short, or that git left as pointers to large ones."""
    damage = next((found for file in folder.glob("*.safetensors") if (found := find_file_damage(file))), None)
    for file in folder.glob("*.json"):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            damage = f"{file} is not JSON: {error}"
    if damage is not None:
        raise ConfigError(
            f"model_name: expected a model folder with complete files, got {name!r} where {damage}; download the model "
            "again"
        )


def fetch_weights(name: str | None, model_path: Path) -> None:
    """Download the weights of a model that `find_model` found on the hub, of the same commit, if they are not there."""
    if name is None or _has_weights(model_path):
        return
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    with boundary(
        ConfigError, f"model_name: expected the weights of {name!r} on the hub; download them, then try again"
    ):
        snapshot_download(repository_of(name), revision=model_path.name)


def require_trainable(model_path: Path, lora_rank: int, lora_modules: Sequence[LoraModule] = ("language",)) -> None:
    """Raise `ConfigError` for a model of a family that the trainer does not know, or not without an adapter."""
    if not lora_modules:
        raise ConfigError("trainer.lora_modules: expected parts of the model to adapt, got none; leave it out")
    kind = str(json.loads((model_path / "config.json").read_text(encoding="utf-8")).get("model_type"))
    if kind not in FAMILIES:
        raise ConfigError(
            f"model_name: expected a model of a type among {sorted(FAMILIES)} to train, got {kind!r} in "
            f"{str(model_path)!r}; choose one, such as Qwen/Qwen3-VL-4B-Instruct"
        )
    if FAMILIES[kind].served_modules and set(lora_modules) != {"language"}:
        raise ConfigError(
            f"trainer.lora_modules: expected only language for a model of type {kind!r}, whose vision tower vLLM "
            f"serves without adapters, got {', '.join(lora_modules)}; leave it out"
        )
    if not lora_rank and FAMILIES[kind].full_training_problem is not None:
        raise ConfigError(
            f"lora_rank: expected at least 1 for a model of type {kind!r}, got 0, which trains all weights: "
            f"{FAMILIES[kind].full_training_problem}; train an adapter"
        )


def make_image_renderer(model_path: Path, renderer_name: str | None, max_pixels: int | None = None) -> Renderer:
    """The model's renderer, or the named one, for screenshots of at most `max_pixels` after scaling.

    Raises `ConfigError` for a renderer that cannot show the model screenshots, or for image settings that leave
    something open.
    """
    renderer = make_renderer(model_path, renderer_name)
    if renderer.image_settings is None:
        raise ConfigError(
            f"expected a renderer for a model that sees screenshots, got {renderer.name!r}; choose a vision model, "
            "or leave renderer_name out"
        )
    require_pixel_statistics(model_path)
    if max_pixels is not None:
        renderer.image_settings = replace(renderer.image_settings, max_pixels=max_pixels)
    return renderer


def max_positions(model_path: Path) -> int:
    """Maximum sequence length of the model, tokens; very large if its configuration does not state one."""
    settings = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    return int(settings.get("text_config", settings).get("max_position_embeddings", 1 << 30))


def find_max_model_len(model_path: Path, wanted: int | None, *, max_tokens: int) -> int:
    """Maximum tokens of prompt and response together; raises `ConfigError` if the model or a response needs more."""
    longest = max_positions(model_path)
    max_model_len = wanted or min(longest, LONGEST_BY_DEFAULT)
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len: expected at most {longest}, the positions of {model_path.name}, got {max_model_len}; set "
            f"max_model_len={longest}"
        )
    if max_tokens >= max_model_len:
        raise ConfigError(f"max_tokens: expected less than max_model_len={max_model_len}, got {max_tokens}; lower it")
    return max_model_len


def start_limit_s(model_path: Path) -> float:
    """Seconds in which a server has compiled, and read its weights from a slow network disk."""
    num_bytes = sum(file.stat().st_size for pattern in _WEIGHT_FILES for file in model_path.glob(pattern))
    return _COMPILING_S + num_bytes / _SLOW_DISK_BYTES_PER_S


def _has_weights(folder: Path) -> bool:
    """Whether the weights are there, all of them if an index lists several files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / name).is_file() for name in names)
    return any(next(folder.glob(pattern), None) for pattern in _WEIGHT_FILES)
