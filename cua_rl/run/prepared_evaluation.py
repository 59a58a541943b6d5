"""Resolves and checks an evaluation configuration before a model is loaded or an endpoint is called."""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.plain_config import find_stored, plain_config, stored_setting
from cua_rl.database.session import find_database
from cua_rl.environments.table import find_environment
from cua_rl.evaluation.openai_endpoint import RemoteModel
from cua_rl.host.masking import is_line
from cua_rl.judge.config import JudgeConfig
from cua_rl.machine.gpus import require_platform
from cua_rl.machine.machine import find_machine
from cua_rl.machine.memory_parts import Request
from cua_rl.machine.memory_plan import MemoryBudget, plan_memory
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.renderers.images import largest_image_tokens
from cua_rl.renderers.renderer import Renderer
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rewards.reward import RewardFunction
from cua_rl.run.devices import PreparedDevices, complete_sources, prepare_devices, require_own_model
from cua_rl.run.evaluation_config import EvaluateConfig
from cua_rl.run.judge import has_judge, prepare_judge
from cua_rl.run.preflight import prepare_prompts
from cua_rl.run.rollout_config import IN_PIXELS
from cua_rl.run.rollouts import check_agent
from cua_rl.run_folder.checkpoints import AdapterFolder, find_saved, load_adapter_folder
from cua_rl.run_folder.log_directory import load_settings, run_folder
from cua_rl.run_folder.model_folder import find_max_model_len, find_model, make_image_renderer, pinned_name
from cua_rl.sampling.config import ServerConfig, max_lora_rank
from cua_rl.sampling.vllm_command import installed_platform
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.task import Task
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import is_object
from cua_rl.types.rollout import SamplingParams

logger = logging.getLogger(__name__)

_DEFINING = (
    "tasks", "seed", "max_turns", "max_tokens", "temperature", "reward", "reward_clip", "device", "box_type",
    "devices.coordinate_mode", "devices.screen_scale", "devices.browser_scale",
    "agent.name", "agent.command", "agent.harness_command", "agent.action_format", "agent.history",
    "agent.history_images",
    "server.max_model_len", "server.max_pixels", "renderer_name", "judge_fingerprint",
)  # fmt: skip
"""Settings that must not change when an evaluation is resumed; tasks, attempts and models may be added."""

_SEEN = (
    "max_turns", "max_tokens", "device", "devices.coordinate_mode", "devices.screen_scale", "devices.browser_scale",
    "agent.name", "agent.action_format", "agent.history", "agent.history_images", "server.max_pixels", "renderer_name",
)  # fmt: skip
"""Settings with which a policy sees and does something else than in its training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model folder that vLLM serves, with or without an adapter."""

    name: str
    model_name: str | None
    """As given by the user; None is the tiny model."""
    model_path: Path
    adapter: AdapterFolder | None


Model = LocalModel | RemoteModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine:
    """Renderer, server and memory of a model folder."""

    renderer: Renderer
    server: ServerConfig
    memory: MemoryBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """An evaluation configuration with all references resolved."""

    config: EvaluateConfig
    log_path: Path
    models: tuple[Model, ...]
    engines: Mapping[Path, LocalEngine]
    """Engine of each model folder."""
    devices: PreparedDevices
    tasks: tuple[Task, ...]
    reward: RewardFunction
    judge: JudgeConfig | None
    params: SamplingParams
    database_url: str | None
    """None for the embedded database."""

    def settings(self) -> dict[str, object]:
        """The whole configuration as JSON without secrets, for config.json, results.json and the dry run."""
        return plain_config(self.config) | {
            "models": [plain_config(shown_model(model)) for model in self.models],
            "log_path": str(self.log_path),
            "num_task_templates": len({task.task_id for task in self.tasks}),
            "judge_fingerprint": None if self.judge is None else self.judge.fingerprint,
        }


async def prepare_evaluation(config: EvaluateConfig) -> PreparedEvaluation:
    """Resolve the configuration; raises `ConfigError` for the first problem."""
    models = parse_models(config.models, config.model_name)
    paths = list(dict.fromkeys(model.model_path for model in models if isinstance(model, LocalModel)))
    engines = {path: prepare_engine(path, config, models) for path in paths}
    if config.base_url is not None and len(paths) > 1:
        raise ConfigError(
            f"base_url: expected one model folder, the one that the server there serves, got {len(paths)}; "
            "evaluate them one after the other"
        )
    # the same models give the same folder, so that the same command can resume
    names = re.sub(r"[^\w.+-]+", "_", "-".join(model.name for model in models))
    log_path = run_folder(config.log_path, None, f"evaluate-{names[:80]}")
    environment = find_environment(config.tasks, config.device)
    check_agent(config, environment)
    others = [model.name for model in models if not isinstance(model, LocalModel)]
    if config.agent.name != "gbox" and others:
        raise ConfigError(
            f"agent: expected agent=gbox for models behind somebody else's endpoint, got {config.agent.name!r} with "
            f"{', '.join(others)}; evaluate them apart"
        )
    if any(isinstance(model, LocalModel) and model.model_name is None for model in models):
        require_own_model(environment, None)
    if config.agent.action_format in IN_PIXELS and others:
        raise ConfigError(
            "agent.action_format: expected one without pixels for models behind somebody else's endpoint, because it "
            f"is not known how they resize screenshots, got {config.agent.action_format!r} with {', '.join(others)}; "
            "evaluate them apart"
        )
    _warn_of_other_settings(config, models)
    devices = prepare_devices(config, log_path)
    held_out = load_tasks(
        complete_sources(config.tasks, config.devices),
        seed=config.seed,
        split="eval",
        device=devices.backend.abilities,
        has_judge=has_judge(config),
    )
    tasks = tuple(held_out.held_out(config.num_tasks))
    judge = await prepare_judge(config, held_out)
    num_turns = min(config.max_turns, max(task.max_turns for task in tasks))
    contexts = [(engine.renderer, engine.server.context_tokens) for engine in engines.values()]
    config, max_images = await prepare_prompts(config, devices, contexts, num_turns)
    return PreparedEvaluation(
        config=config,
        log_path=log_path,
        models=models,
        engines={
            path: replace(engine, server=with_values(engine.server, max_images=max_images))
            for path, engine in engines.items()
        },
        devices=devices,
        tasks=tasks,
        reward=load_reward(config.reward, config.reward_clip),
        judge=judge,
        params=SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature),
        database_url=await find_database(os.environ),
    )


def _warn_of_other_settings(config: EvaluateConfig, models: Sequence[Model]) -> None:
    """Say with which settings the policy of a run is evaluated that it was not trained with."""
    now = plain_config(config)
    for model in [model for model in models if isinstance(model, LocalModel)]:
        weights = model.adapter.path if model.adapter else model.model_path
        run = weights.parent.parent
        if weights.parent.name != "sampler_weights" or not (run / "config.json").is_file():
            continue
        trained = load_settings(run, "models")
        for name in _SEEN:
            (is_stored, was), (_, wanted) = find_stored(trained, name), find_stored(now, name)
            if is_stored and was != wanted:
                logger.warning("%s was trained with %s=%s and is evaluated with %s", model.name, name, was, wanted)


def require_same_evaluation(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise `ConfigError` if the evaluation to be resumed was started with other settings."""
    # before settings had groups, these were not stored, or under other names; nor were those that are newer
    known = [
        name
        for name in _DEFINING
        if not name.startswith(("agent.", "server.")) or ("server" in before and find_stored(before, name)[0])
    ]
    changed = [name for name in known if stored_setting(before, name) != stored_setting(now, name)]
    earlier = {_name(model): model for model in _models(before)}
    changed += [f"models ({_name(model)})" for model in _models(now) if earlier.get(_name(model), model) != model]
    if changed:
        raise ConfigError(
            f"expected the settings of the evaluation that is resumed, got other {', '.join(changed)}; use its "
            "settings, another log_path, or behavior_if_log_dir_exists=overwrite"
        )


def with_earlier_models(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, object]:
    """The settings of an evaluation that is resumed, with all models that it has ever had: their names are taken."""
    return {**now, "models": [*{_name(model): model for model in (*_models(before), *_models(now))}.values()]}


def _models(settings: Mapping[str, object]) -> Sequence[Mapping[str, Any]]:
    models: Any = settings.get("models", [])
    return models


def _name(model: Mapping[str, Any]) -> str:
    return str(model["name"])


def prepare_engine(model_path: Path, config: EvaluateConfig, models: Sequence[Model]) -> LocalEngine:
    """Renderer, server and memory of a model folder, with room for the adapters of the models in it."""
    renderer = make_image_renderer(model_path, config.renderer_name, config.server.max_pixels)
    max_model_len = find_max_model_len(model_path, config.server.max_model_len, max_tokens=config.max_tokens)
    local = [one for one in models if isinstance(one, LocalModel) and one.model_path == model_path]
    adapters = [one.adapter for one in local if one.adapter]
    rank = max_lora_rank(max((adapter.rank for adapter in adapters), default=8))
    server = with_values(
        config.server,
        model_path=model_path,
        max_model_len=max_model_len,
        max_lora_rank=rank,
        adapts_vision=any(adapter.reaches_vision for adapter in adapters),
    )
    request = Request(
        model=load_model_sizes(model_path),
        machine=find_machine(config.machine, os.environ, is_dry_run=config.dry_run),
        server=server,
        trainer=TrainerConfig(lora_rank=rank, vision_cache_gib=0.0),
        has_server=config.base_url is None,
        has_trainer=False,
        context_tokens=max_model_len,
        num_rollouts=config.max_concurrent_rollouts,
        largest_image_tokens=largest_image_tokens(model_path, config.server.max_pixels),
    )
    memory = plan_memory(request)
    if config.base_url is None and config.machine is None:  # otherwise for another machine
        require_platform(memory.gpus, installed_platform())
    return LocalEngine(renderer=renderer, server=memory.fill_server(server), memory=memory)


_LOCAL_KEYS = ("name", "model_name", "adapter")
_REMOTE_KEYS = ("name", "base_url", "model", "api", "api_key_env", "extra")
_NO_KEY = "not-needed"  # what the openai package sends where nothing is asked for


def parse_models(entries: Sequence[Mapping[str, object]], default_model_name: str | None) -> tuple[Model, ...]:
    """Resolve the entries of `models`; raises `ConfigError` for a malformed entry, or a model that does not exist."""
    if not entries:
        raise ConfigError('models: expected at least one entry, got none; write models=\'[{"name": "base"}]\'')
    models = tuple(_parse_entry(entry, default_model_name) for entry in entries)
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"models: expected a different name for each entry, got {twice!r} more than once; rename one")
    return models


def read_api_key(model: RemoteModel) -> str:
    """The endpoint's key from the environment; raises `ConfigError` if the variable is not set."""
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
    if not is_object(entry):
        raise ConfigError(f'models: expected entries such as {{"name": "base"}}, got {entry!r}; write an object')
    fields = entry
    is_remote = any(key in fields for key in ("base_url", "model", "api", "api_key_env", "extra"))
    _check_keys(fields, _REMOTE_KEYS if is_remote else _LOCAL_KEYS)
    name = _entry_text(fields, "name")
    if name is None:
        raise ConfigError(f"models: expected a name in every entry, got {dict(fields)!r}; add one")
    if is_remote:
        base_url, model = _entry_text(fields, "base_url"), _entry_text(fields, "model")
        api = _entry_text(fields, "api") or "responses"
        if base_url is None or not _is_http(base_url):
            raise ConfigError(
                f"models: expected base_url of {name!r} as http://... or https://..., got {base_url!r}; write the "
                "address up to its /v1"
            )
        if model is None:
            raise ConfigError(f"models: expected the endpoint's own name of model {name!r}, got none; add model")
        if api not in ("responses", "chat"):
            raise ConfigError(f"models: expected api of {name!r} as responses or chat, got {api!r}; choose one")
        extra = fields.get("extra", dict[str, object]())
        if not is_object(extra):
            raise ConfigError(f"models: expected extra of {name!r} as a JSON object, got {extra!r}; correct it")
        remote = RemoteModel(
            name=name,
            base_url=base_url,
            model=model,
            api=api,
            extra=extra,
            api_key_env=_entry_text(fields, "api_key_env"),
        )
        read_api_key(remote)
        return remote
    adapter = _entry_text(fields, "adapter")
    model_name = _entry_text(fields, "model_name") or default_model_name
    model_path = find_model(model_name)
    return LocalModel(
        name=name,
        model_name=pinned_name(model_name, model_path),
        model_path=model_path,
        adapter=None if adapter is None else load_adapter_folder(find_saved(adapter, "sampler_weights"), model_path),
    )


def _is_http(address: str) -> bool:
    with suppress(ValueError):  # brackets of an IPv6 address that are not closed
        return urlsplit(address).scheme in ("http", "https")
    return False


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


def _entry_text(fields: Mapping[str, object], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and not (isinstance(value, str) and value and is_line(value)):
        raise ConfigError(f"models: expected {key} as a line of text, got {value!r}; correct it")
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
                "base_url": model.base_url,
                "model": model.model,
                "api": model.api,
                "extra": json.loads(json.dumps(dict(model.extra))),
            }


def model_settings(model: Model) -> dict[str, Any]:
    """What the settings of the model's own run say of it; the models of the evaluation are this one."""
    shown = shown_model(model)
    names = {"model_name": model.model_name, "model_path": shown["model_path"]} if isinstance(model, LocalModel) else {}
    return {"model_name": shown.get("model"), **names, "models": [plain_config(shown)]}
