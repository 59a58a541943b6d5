"""Where a model's files are: a folder, the hub's local cache, the hub, or the tiny model of this package."""

from importlib.resources import files
from pathlib import Path

from cua_rl.errors import ConfigError

HUB_TIMEOUT_S = 3.0


def find_model(name: str | None) -> Path:
    """The folder of the model called `name`; None is the tiny model. Downloads from the hub what is not there yet.

    Raises `ConfigError` if there is no such model, before anything is loaded.
    """
    if name is None:
        return Path(str(files("cua_rl"))) / "models" / "tiny_qwen3_vl"
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
    from httpx import HTTPError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise _no_model(name, error) from None
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return Path(snapshot_download(name))
    except (HTTPError, HfHubHTTPError, OSError) as error:  # not there, no network, or told to stay offline
        raise _no_model(name, error) from None


def _no_model(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model_name: expected a folder, or a model of the hub that can be reached, got {name!r} "
        f"({type(error).__name__}); check the spelling, or download the model and name its folder"
    )
