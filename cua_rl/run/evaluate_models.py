"""From the entries of `models` to what will be asked: our own models, with or without adapter, and endpoints."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from cua_rl.errors import ConfigError
from cua_rl.evaluation.openai_endpoint import Endpoint
from cua_rl.run.adapter_folder import AdapterFolder, load_adapter_folder
from cua_rl.run.model_folder import find_model


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model folder that vLLM serves, as it is or under an adapter."""

    name: str
    model_name: str | None
    """As it was written; None is the tiny model."""
    model_path: Path
    adapter: AdapterFolder | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A model behind somebody else's endpoint. The API key stays in the environment until it is used."""

    name: str
    endpoint: Endpoint
    api_key_env: str | None


Model = LocalModel | RemoteModel

_LOCAL_KEYS = ("name", "model_name", "adapter")
_REMOTE_KEYS = ("name", "base_url", "model", "api", "api_key_env", "extra")
_NO_KEY = "not-needed"  # what the openai package sends where nothing is asked for


def parse_models(entries: Sequence[Mapping[str, object]], default_model_name: str | None) -> tuple[Model, ...]:
    """Look up everything that the entries name.

    Raises:
        ConfigError: an entry cannot be meant, or names something that is not there.
    """
    if not entries:
        raise ConfigError('models: expected at least one entry, got none; write models=\'[{"name": "base"}]\'')
    models = tuple(_parse_entry(entry, default_model_name) for entry in entries)
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"models: expected a different name for each entry, got {twice!r} more than once; rename one")
    return models


def read_api_key(model: RemoteModel) -> str:
    """The endpoint's key from the environment.

    Raises:
        ConfigError: the variable is not set.
    """
    if model.api_key_env is None:
        return _NO_KEY
    key = os.environ.get(model.api_key_env)
    if not key:
        raise ConfigError(
            f"models: expected the API key of {model.name!r} in the environment variable {model.api_key_env!r}, got "
            "nothing there; set it, in the environment or in .env"
        )
    return key


def _parse_entry(entry: object, default_model_name: str | None) -> Model:
    if not isinstance(entry, Mapping):
        raise ConfigError(f'models: expected entries such as {{"name": "base"}}, got {entry!r}; write an object')
    fields = cast("Mapping[str, object]", entry)
    is_remote = any(key in fields for key in ("base_url", "model", "api", "api_key_env", "extra"))
    _check_keys(fields, _REMOTE_KEYS if is_remote else _LOCAL_KEYS)
    name = _text(fields, "name")
    if name is None:
        raise ConfigError(f"models: expected a name in every entry, got {dict(fields)!r}; add one")
    if is_remote:
        return _remote_model(name, fields)
    adapter = _text(fields, "adapter")
    model_name = _text(fields, "model_name") or default_model_name
    model_path = find_model(model_name)
    return LocalModel(
        name=name,
        model_name=model_name,
        model_path=model_path,
        adapter=None if adapter is None else load_adapter_folder(Path(adapter), model_path),
    )


def _remote_model(name: str, fields: Mapping[str, object]) -> RemoteModel:
    base_url, model, api = _text(fields, "base_url"), _text(fields, "model"), _text(fields, "api") or "responses"
    if base_url is None or urlsplit(base_url).scheme not in ("http", "https"):
        raise ConfigError(
            f"models: expected base_url of {name!r} as http://... or https://..., got {base_url!r}; write the address "
            "up to its /v1"
        )
    if model is None:
        raise ConfigError(f"models: expected the endpoint's own name of model {name!r}, got none; add model")
    if api not in ("responses", "chat"):
        raise ConfigError(f"models: expected api of {name!r} as responses or chat, got {api!r}; choose one")
    extra = fields.get("extra", dict[str, object]())
    if not isinstance(extra, Mapping):
        raise ConfigError(f"models: expected extra of {name!r} as a JSON object, got {extra!r}; correct it")
    remote = RemoteModel(
        name=name,
        endpoint=Endpoint(base_url=base_url, model=model, api=api, extra=cast("Mapping[str, object]", extra)),
        api_key_env=_text(fields, "api_key_env"),
    )
    read_api_key(remote)
    return remote


def _check_keys(fields: Mapping[str, object], known: Sequence[str]) -> None:
    for key in fields:
        if key == "api_key":
            raise ConfigError(
                "models: expected api_key_env, the name of an environment variable that holds the key, got api_key; "
                "keys are not written into commands"
            )
        if key not in known:
            near = get_close_matches(key, [*_LOCAL_KEYS, *_REMOTE_KEYS], n=1)
            advice = f"did you mean {near[0]!r}?" if near and near[0] in known else f"choose among {', '.join(known)}"
            raise ConfigError(f"models: expected a key that goes with {', '.join(known[:3])}, got {key!r}; {advice}")


def _text(fields: Mapping[str, object], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"models: expected {key} as text, got {value!r}; correct it")
    return value


def shown_model(model: Model) -> dict[str, Any]:
    """A model as JSON, for config.json and results.json."""
    match model:
        case LocalModel():
            adapter = None if model.adapter is None else str(model.adapter.path)
            return {"name": model.name, "model_path": str(model.model_path), "adapter": adapter}
        case RemoteModel():
            return {
                "name": model.name,
                "base_url": model.endpoint.base_url,
                "model": model.endpoint.model,
                "api": model.endpoint.api,
                "extra": json.loads(json.dumps(dict(model.endpoint.extra))),
            }
