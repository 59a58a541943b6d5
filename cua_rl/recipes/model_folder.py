"""Where a model's files are: a folder, the hub's local cache, the hub, or the tiny model of this package."""

from pathlib import Path

from cua_rl.errors import ConfigError, boundary
from cua_rl.models import TINY_QWEN3_VL

HUB_TIMEOUT_S = 3.0


def find_model(name: str | None) -> Path:
    """The folder of the model called `name`; None is the tiny model. Downloads from the hub what is not there yet.

    Raises `ConfigError` if there is no such model, before anything is loaded.
    """
    if name is None:
        return TINY_QWEN3_VL
    folder = Path(name).expanduser()
    if folder.exists():
        return _require_model(folder.absolute(), name)
    return _find_on_hub(name)


def _require_model(folder: Path, name: str) -> Path:
    missing = [file for file in ("config.json", "tokenizer.json") if not (folder / file).is_file()]
    if missing:
        raise ConfigError(
            f"model_name: expected a model folder with config.json and tokenizer.json, got {name!r} without "
            f"{' and '.join(missing)}; name the folder of a Qwen3-VL checkpoint"
        )
    return folder


def _find_on_hub(name: str) -> Path:
    # Imported here: 0.3 s, and most runs name a folder.
    from huggingface_hub import HfApi, snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import LocalEntryNotFoundError

    problem = (
        f"model_name: expected a folder, or a model of the hub that can be reached, got {name!r}; "
        "check the spelling, or download the model and name its folder"
    )
    with boundary(ConfigError, problem):
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except LocalEntryNotFoundError:
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
            return Path(snapshot_download(name))
