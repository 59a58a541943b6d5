"""Everything about a run that can be known, and refused, before a model loads or a device is leased."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cua_rl.agent.history import History, make_history
from cua_rl.devices.pool import DeviceBackend
from cua_rl.errors import ConfigError, DatabaseError
from cua_rl.judge.judge import JudgeConfig
from cua_rl.monitor.sender import MonitorAddress
from cua_rl.processes import free_port
from cua_rl.recipes.agents import check_agent
from cua_rl.recipes.checkpoint_damage import find_checkpoint
from cua_rl.recipes.gpu_plan import GpuPlan, GpuWishes, plan_gpus, visible_gpus
from cua_rl.recipes.gym_devices import split_gyms
from cua_rl.recipes.judge_config import check_judge, plan_judge, require_precision
from cua_rl.recipes.learning import check_learning
from cua_rl.recipes.log_directory import run_folder
from cua_rl.recipes.model_folder import (
    find_model,
    make_image_renderer,
    max_positions,
    num_attention_heads,
    require_trainable,
)
from cua_rl.recipes.preflight import (
    plan_max_images,
    require_model_server,
    require_monitor,
    require_room,
)
from cua_rl.recipes.run_devices import make_run_backend, require_own_model, smallest_screen
from cua_rl.recipes.run_monitor import find_monitor, spool_folder
from cua_rl.recipes.train_config import CLIConfig
from cua_rl.renderers.renderer import Renderer
from cua_rl.reporting.metric_log import require_wandb
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rewards.reward import RewardFunction
from cua_rl.task_loader import TaskSet, load_tasks, require_disjoint
from cua_rl.tasks.task import Task

logger = logging.getLogger(__name__)

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as --max-lora-rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A configuration whose every reference has been looked up."""

    config: CLIConfig
    run_name: str
    log_path: Path
    model_path: Path
    renderer: Renderer
    devices: DeviceBackend
    train_tasks: TaskSet
    eval_tasks: tuple[Task, ...]
    reward: RewardFunction
    judge: JudgeConfig | None
    """None if no task needs one, and none is asked for beside validators."""
    history: History
    max_images: int
    """Most images of one prompt."""
    max_lora_rank: int
    gpus: GpuPlan
    checkpoint_path: Path | None
    database_url: str | None
    """None for the embedded database."""
    monitor: MonitorAddress | None
    """Another monitor that the run is sent to."""

    def effective(self) -> dict[str, object]:
        """What the run will really use, for people and for the dry run."""
        return {
            "run_name": self.run_name,
            "log_path": str(self.log_path),
            "model_path": str(self.model_path),
            "renderer": self.renderer.name,
            "num_eval_tasks": len(self.eval_tasks),
            "database": "embedded" if self.database_url is None else "from the environment",
            "max_images": self.max_images,
            "sampler": self.config.base_url or "started by the run",
            "judge_fingerprint": None if self.judge is None else self.judge.fingerprint,
            **self.gpus.effective(),
        }


async def plan_run(config: CLIConfig, environ: Mapping[str, str] = os.environ) -> RunPlan:
    """Check the configuration against the world; raises `ConfigError` for the first thing that cannot work."""
    _warn_of_idle_keys(config)
    check_agent(config)
    check_learning(config)
    require_wandb(config.wandb_project)
    require_own_model(config, config.model_name)
    devices = make_run_backend(config, log_path(config))
    model_path = find_model(config.model_name)
    renderer = make_image_renderer(model_path, config.renderer_name)
    require_trainable(model_path)
    _require_room(config, model_path)
    train_tasks, held_out = _load_task_sets(config, devices)
    eval_tasks = () if held_out is None else tuple(held_out.held_out(config.num_eval_rollouts))
    judge = plan_judge(config, config.reward, *(tasks for tasks in (train_tasks, held_out) if tasks))
    await check_judge(judge)
    if judge is not None and train_tasks.is_judged:
        require_precision(
            judge,
            least=config.judge_min_precision,
            record=config.judge_calibration,
            log_dir=config.log_dir,
            is_forced=config.judge_force,
        )
    for name in ("server_port", "gateway_port", "monitor_port"):
        _require_free_port(name, getattr(config, name))
    num_turns = min(config.max_turns, max(task.max_turns for task in (*_one_of_each(train_tasks), *eval_tasks)))
    screen = smallest_screen(config)
    if screen is not None:
        require_room(config, renderer, screen, num_turns=num_turns, max_model_len=config.max_model_len)
    max_images = plan_max_images(config, num_turns)
    if config.base_url is not None:
        await require_model_server(config.base_url, max_model_len=config.max_model_len, num_images=max_images)
    return RunPlan(
        config=config,
        run_name=run_name(config),
        log_path=log_path(config),
        model_path=model_path,
        renderer=renderer,
        devices=devices,
        train_tasks=train_tasks,
        eval_tasks=eval_tasks,
        reward=load_reward(config.reward),
        judge=judge,
        history=make_history(config.history, max_images=config.history_images, block=config.history_block),
        max_images=max_images,
        max_lora_rank=max_lora_rank(config.lora_rank),
        gpus=_gpu_plan(config, model_path, environ),
        checkpoint_path=find_checkpoint(
            config.load_checkpoint_path, lora_rank=config.lora_rank, lora_alpha=config.lora_alpha
        ),
        database_url=await _reachable_database(environ),
        monitor=await _reachable_monitor(config, environ),
    )


def _load_task_sets(config: CLIConfig, devices: DeviceBackend) -> tuple[TaskSet, TaskSet | None]:
    """Training tasks, and held-out ones if any are asked for, with nothing in common."""
    has_judge, device = config.judge_model is not None, devices.abilities
    train_sources, eval_sources = split_gyms(config.tasks, config.eval_tasks, config)
    train_tasks = load_tasks(train_sources, seed=config.seed, split="train", device=device, has_judge=has_judge)
    if eval_sources is None:
        return train_tasks, None
    held_out = load_tasks(eval_sources, seed=config.seed, split="eval", device=device, has_judge=has_judge)
    require_disjoint(train_tasks, held_out)
    return train_tasks, held_out


def _one_of_each(tasks: TaskSet) -> list[Task]:
    return tasks.batch(0, len(tasks.templates))


async def _reachable_monitor(config: CLIConfig, environ: Mapping[str, str]) -> MonitorAddress | None:
    """Where the run is sent; a run that goes on may begin while the monitor is away, and sends later."""
    address = find_monitor(config, environ)
    if address is not None and not spool_folder(log_path(config)).exists():
        await require_monitor(address)
    return address


def run_name(config: CLIConfig) -> str:
    """The same settings give the same name, so that the same command can resume."""
    if config.log_path is not None:
        return Path(config.log_path).name
    model = "embedded-demo" if config.model_name is None else Path(config.model_name).name
    return f"{model}-g{config.groups_per_batch}x{config.group_size}-lr{config.learning_rate:g}-seed{config.seed}"


def log_path(config: CLIConfig) -> Path:
    """Where the run writes."""
    return run_folder(config.log_path, config.log_dir, run_name(config))


def _warn_of_idle_keys(config: CLIConfig) -> None:
    if config.gbox_api_key and "gbox" not in (config.device, config.coordinate_mode):
        logger.warning("gbox_api_key has no effect without device=gbox or coordinate_mode=gbox")
    if config.tinker_api_key:
        logger.warning("tinker_api_key has no effect: vLLM samples")


def _require_room(config: CLIConfig, model_path: Path) -> None:
    longest = max_positions(model_path)
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len: expected at most {longest}, the positions of {model_path.name}, got "
            f"{config.max_model_len}; set max_model_len={longest}"
        )
    if config.max_tokens >= config.max_model_len:
        raise ConfigError(
            f"max_tokens: expected less than max_model_len={config.max_model_len}, got {config.max_tokens}; lower it"
        )


def _gpu_plan(config: CLIConfig, model_path: Path, environ: Mapping[str, str]) -> GpuPlan:
    wishes = GpuWishes(
        server_gpus=config.server_gpus,
        server_tensor_parallel=config.server_tensor_parallel,
        gpu_memory_utilization=config.gpu_memory_utilization,
        trainer_gpus=config.trainer_gpus,
        trainer_num_processes=config.trainer_num_processes,
        has_server=config.base_url is None,
    )
    plan = plan_gpus(visible_gpus(environ), wishes, num_attention_heads(model_path))
    if config.trainer_sharding == "full" and plan.num_trainer_processes == 1:
        raise ConfigError(
            "trainer_sharding: expected 'none' with one trainer process, which holds the whole model, got 'full'; set "
            "trainer_num_processes, or name several trainer_gpus"
        )
    return plan


def max_lora_rank(rank: int) -> int:
    """The smallest rank that vLLM accepts as its largest and that holds `rank`."""
    fitting = [allowed for allowed in LORA_RANKS if allowed >= rank]
    if not fitting:
        raise ConfigError(f"lora_rank: expected at most {LORA_RANKS[-1]}, got {rank}; lower it")
    return fitting[0]


def _require_free_port(name: str, port: int | None) -> None:
    if port is None:
        return
    try:
        free_port(port)
    except OSError as error:
        raise ConfigError(
            f"{name}: expected a free port, got {port} ({error.strerror}); choose another one, or leave it out"
        ) from None


async def _reachable_database(environ: Mapping[str, str]) -> str | None:
    from cua_rl.database.session import check_connection, database_url  # SQLAlchemy: a third of what `--help` loads

    url = database_url(environ)
    if url is not None:
        try:
            await check_connection(url)
        except DatabaseError as error:
            raise ConfigError(str(error)) from None
    return url
