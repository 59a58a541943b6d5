"""Everything about an evaluation that can be known, and refused, before a model loads or an endpoint is asked."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cua_rl.agent.history import History, make_history
from cua_rl.command_line.plain_config import plain_config
from cua_rl.devices.pool import DeviceBackend
from cua_rl.errors import ConfigError
from cua_rl.judge.judge import JudgeConfig
from cua_rl.renderers.renderer import Renderer
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rewards.reward import RewardFunction
from cua_rl.run.agents import check_agent
from cua_rl.run.evaluate_config import EvaluateConfig
from cua_rl.run.evaluate_models import LocalModel, Model, parse_models, shown_model
from cua_rl.run.gpus import GpuPlan, GpuWishes, plan_gpus, visible_gpus
from cua_rl.run.gyms import name_gym
from cua_rl.run.judge import check_judge, plan_judge, require_precision
from cua_rl.run.model_folder import make_image_renderer, max_positions, num_attention_heads
from cua_rl.run.preflight import plan_max_images, require_model_server, require_room
from cua_rl.run.site import make_run_backend, require_own_model, smallest_screen
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.task import Task
from cua_rl.types import SamplingParams

_DEFINING = (
    "tasks", "seed", "max_turns", "max_tokens", "temperature", "reward", "device", "box_type", "coordinate_mode",
    "screen_scale", "browser_scale",
    "renderer_name", "judge_fingerprint",
)  # fmt: skip
"""Settings that an evaluation cannot change half way; more tasks, attempts and models may be added."""


_LONGEST_BY_DEFAULT = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine:
    """How a model folder is rendered and served."""

    renderer: Renderer
    max_model_len: int
    gpus: GpuPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """A configuration whose every reference has been looked up."""

    config: EvaluateConfig
    log_path: Path
    models: tuple[Model, ...]
    engines: Mapping[Path, LocalEngine]
    """By the folder of the model."""
    devices: DeviceBackend
    tasks: tuple[Task, ...]
    max_images: int
    """Most images of one prompt."""
    reward: RewardFunction
    judge: JudgeConfig | None
    history: History
    params: SamplingParams

    def settings(self) -> dict[str, object]:
        """The whole configuration as JSON without secrets, for config.json, results.json and the dry run."""
        return plain_config(self.config) | {
            "models": [plain_config(shown_model(model)) for model in self.models],
            "log_path": str(self.log_path),
            "num_task_templates": len({task.task_id for task in self.tasks}),
            "judge_fingerprint": None if self.judge is None else self.judge.fingerprint,
        }


async def plan_evaluation(config: EvaluateConfig) -> EvaluationPlan:
    """Check the configuration against the world; raises `ConfigError` for the first thing that cannot work."""
    models = parse_models(config.models, config.model_name)
    paths = list(dict.fromkeys(model.model_path for model in models if isinstance(model, LocalModel)))
    engines = {path: _plan_engine(path, config) for path in paths}
    if config.base_url is not None and len(paths) > 1:
        raise ConfigError(
            f"base_url: expected one model folder, the one that the server there serves, got {len(paths)}; "
            "evaluate them one after the other"
        )
    log_path = _log_path(config, models)
    _check_agent(config, models)
    if any(isinstance(model, LocalModel) and model.model_name is None for model in models):
        require_own_model(config, None)
    devices = make_run_backend(config, log_path)
    held_out = load_tasks(
        name_gym(config.tasks, config),
        seed=config.seed,
        split="eval",
        device=devices.abilities,
        has_judge=config.judge_model is not None,
    )
    tasks = tuple(held_out.held_out(config.num_tasks))
    judge = plan_judge(config, config.reward, held_out)
    await check_judge(judge)
    if judge is not None and held_out.is_judged:
        require_precision(judge, least=None, record=None, log_dir=None, is_forced=False)
    max_images = await _require_room(config, engines, tasks)
    return EvaluationPlan(
        config=config,
        log_path=log_path,
        models=models,
        engines=engines,
        devices=devices,
        tasks=tasks,
        max_images=max_images,
        reward=load_reward(config.reward),
        judge=judge,
        history=make_history(config.history, max_images=config.history_images, block=config.history_block),
        params=SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature),
    )


async def _require_room(config: EvaluateConfig, engines: Mapping[Path, LocalEngine], tasks: Sequence[Task]) -> int:
    """The images of the longest prompt; raises `ConfigError` if a model's context or its server cannot hold that."""
    num_turns = min(config.max_turns, max(task.max_turns for task in tasks))
    screen, max_images = smallest_screen(config), plan_max_images(config, num_turns)
    for engine in engines.values():
        if screen is not None:
            require_room(config, engine.renderer, screen, num_turns=num_turns, max_model_len=engine.max_model_len)
        if config.base_url is not None:
            await require_model_server(config.base_url, max_model_len=engine.max_model_len, num_images=max_images)
    return max_images


def _check_agent(config: EvaluateConfig, models: Sequence[Model]) -> None:
    check_agent(config)
    others = [model.name for model in models if not isinstance(model, LocalModel)]
    if config.agent != "gbox" and others:
        raise ConfigError(
            f"agent: expected agent=gbox for models behind somebody else's endpoint, got {config.agent!r} with "
            f"{', '.join(others)}; evaluate them apart"
        )


def require_same_evaluation(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise `ConfigError` if what is to be resumed measured something else."""
    changed = [name for name in _DEFINING if before.get(name) != now.get(name)]
    earlier = {_name(model): model for model in _models(before)}
    changed += [f"models ({_name(model)})" for model in _models(now) if earlier.get(_name(model), model) != model]
    if changed:
        raise ConfigError(
            f"expected the settings of the evaluation that is resumed, got other {', '.join(changed)}; use its "
            "settings, another log_path, or behavior_if_log_dir_exists=overwrite"
        )


def _models(settings: Mapping[str, object]) -> Sequence[Mapping[str, Any]]:
    models: Any = settings.get("models", [])
    return models


def _name(model: Mapping[str, Any]) -> str:
    return str(model["name"])


def _plan_engine(model_path: Path, config: EvaluateConfig) -> LocalEngine:
    renderer = make_image_renderer(model_path, config.renderer_name)
    longest = max_positions(model_path)
    max_model_len = config.max_model_len or min(longest, _LONGEST_BY_DEFAULT)
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len: expected at most {longest}, the positions of {model_path.name}, got "
            f"{max_model_len}; set max_model_len={longest}"
        )
    if config.max_tokens >= max_model_len:
        raise ConfigError(f"max_tokens: expected less than {max_model_len} tokens, got {config.max_tokens}; lower it")
    wishes = GpuWishes(
        server_gpus=config.server_gpus,
        server_tensor_parallel=config.server_tensor_parallel,
        gpu_memory_utilization=config.gpu_memory_utilization,
        has_server=config.base_url is None,
        has_trainer=False,
    )
    gpus = plan_gpus(visible_gpus(os.environ), wishes, num_attention_heads(model_path))
    return LocalEngine(renderer=renderer, max_model_len=max_model_len, gpus=gpus)


def _log_path(config: EvaluateConfig, models: Sequence[Model]) -> Path:
    """The same models give the same folder, so that the same command can resume."""
    if config.log_path is not None:
        return Path(config.log_path).expanduser().absolute()
    names = re.sub(r"[^\w.+-]+", "_", "-".join(model.name for model in models))
    return (Path("runs") / f"evaluate-{names[:80]}").absolute()
