"""Resolves and checks a training configuration before a model is loaded or a device is leased."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cua_rl.cluster import check_address, check_cluster
from cua_rl.command_line.fields import with_values
from cua_rl.database.session import find_database
from cua_rl.environments.contract import Environment
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.table import find_environment
from cua_rl.host.processes import free_port
from cua_rl.judge.config import JudgeConfig
from cua_rl.machine.gpus import require_platform, visible_gpus
from cua_rl.machine.machine import find_machine
from cua_rl.machine.memory_plan import MemoryBudget
from cua_rl.monitor.sender import MonitorAddress
from cua_rl.renderers.renderer import Renderer
from cua_rl.reporting.metric_log import require_wandb
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rewards.reward import RewardFunction
from cua_rl.run.devices import PreparedDevices, complete_sources, prepare_devices, require_own_model, split_sources
from cua_rl.run.judge import has_judge, prepare_judge
from cua_rl.run.monitor import find_monitor, spool_folder
from cua_rl.run.preflight import prepare_prompts, require_monitor
from cua_rl.run.resolve import resolve
from cua_rl.run.rollouts import check_agent
from cua_rl.run.tinker import TinkerService, check_tinker, find_service
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.checkpoints import find_checkpoint
from cua_rl.run_folder.log_directory import run_folder
from cua_rl.run_folder.model_folder import (
    find_max_model_len,
    find_model,
    make_image_renderer,
    pinned_name,
    repository_of,
    require_trainable,
)
from cua_rl.sampling.canary import require_canary_room
from cua_rl.sampling.vllm_command import installed_platform
from cua_rl.task_loader import TaskSet, load_tasks, require_disjoint, tasks_sha256
from cua_rl.tasks.task import Task
from cua_rl.training.config import TrainerConfig
from cua_rl.training.libraries import require_libraries
from cua_rl.training.loss_checks import check_loss_config
from cua_rl.types.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTraining:
    """A training configuration without open choices, and the objects that it names."""

    config: CLIConfig
    run_name: str
    log_path: Path
    renderer: Renderer
    devices: PreparedDevices
    train_tasks: TaskSet
    eval_tasks: tuple[Task, ...]
    reward: RewardFunction
    judge: JudgeConfig | None
    """None if no task needs one, and none is asked for beside validators."""
    memory: MemoryBudget
    checkpoint_path: Path | None
    database_url: str | None
    """None for the embedded database."""
    monitor: MonitorAddress | None
    """Remote monitor to which the run is sent."""
    service: TinkerService | None = None
    """Trains and samples, with training=tinker."""

    def effective(self) -> dict[str, object]:
        """The values that the run uses, for config.json and `dry_run`."""
        return {
            "run_name": self.run_name,
            "log_path": str(self.log_path),
            "model_name": self.config.model_name,
            "max_concurrent_rollouts": self.config.max_concurrent_rollouts,
            "model_path": str(self.config.server.model_path),
            "renderer": self.renderer.name,
            "num_eval_tasks": len(self.eval_tasks),
            "tasks_sha256": tasks_sha256(self.train_tasks, self.eval_tasks),
            "database": "embedded" if self.database_url is None else "from the environment",
            "max_model_len": self.config.server.max_model_len,
            "max_images": self.config.server.max_images,
            "parity_limit": self.config.trainer.parity_limit,
            "sampler": self.config.base_url or "started by the run",
            "judge_fingerprint": None if self.judge is None else self.judge.fingerprint,
            **self.memory.effective(),
        }


async def prepare_training(
    config: CLIConfig, environ: Mapping[str, str] = os.environ, *, reference: Path | None = None
) -> PreparedTraining:
    """Resolve the configuration, with a resumed run's copy of its first weights; raises `ConfigError` for a problem."""
    _warn_of_idle_keys(config)
    environment = find_environment(config.tasks, config.device)
    check_agent(config, environment)
    check_workers(config, environment, environ)
    check_learning(config)
    if config.training == "tinker":
        config = check_tinker(config, environ)
    require_wandb(config.wandb_project)
    require_own_model(environment, config.model_name)
    devices = prepare_devices(config, log_path(config), environ)
    check_branching(config, devices.backend.abilities)
    model_path = find_model(config.model_name)
    config = with_values(config, model_name=pinned_name(config.model_name, model_path))
    renderer = make_image_renderer(model_path, config.renderer_name, config.server.max_pixels)
    require_trainable(model_path, config.lora_rank, config.trainer.lora_modules)
    max_model_len = find_max_model_len(model_path, config.server.max_model_len, max_tokens=config.max_tokens)
    train_tasks, held_out = load_task_sets(config, devices)
    eval_tasks = () if held_out is None else tuple(held_out.held_out(config.evaluation.num_eval_rollouts))
    judge = await prepare_judge(config, train_tasks, held_out, log_dir=config.log_dir)
    _require_free_ports(config)
    tasks = (*train_tasks.batch(0, len(train_tasks.templates)), *eval_tasks)
    num_turns = min(config.max_turns, max(task.max_turns for task in tasks))
    if config.training == "local":
        check_trainer(config.trainer, environ, is_here=config.machine is None)
        require_canary_room(renderer, max_model_len)
    service = await find_service(config, environ, max_model_len) if config.training == "tinker" else None
    config, max_images = await prepare_prompts(config, devices, [(renderer, max_model_len)], num_turns)
    monitor = find_monitor(config.monitor, environ)
    # a resumed run may start while its monitor is down: it sends its events later
    if monitor is not None and not spool_folder(log_path(config)).exists():
        await require_monitor(monitor)
    config = with_values(config, server=with_values(config.server, max_images=max_images))
    machine = find_machine(config.machine, environ, is_dry_run=config.dry_run)
    config, memory = resolve(config, machine, model_path)
    if config.base_url is None and config.machine is None:  # otherwise the run is on another machine
        require_platform(memory.gpus, installed_platform())
    return PreparedTraining(
        config=config,
        run_name=run_name(config),
        log_path=log_path(config),
        renderer=renderer,
        devices=devices,
        train_tasks=train_tasks,
        eval_tasks=eval_tasks,
        reward=load_reward(config.reward, config.reward_clip, config.credit.milestone_reward),
        judge=judge,
        memory=memory,
        checkpoint_path=reference
        or find_checkpoint(
            config.load_checkpoint_path, lora_rank=config.lora_rank, lora_alpha=config.trainer.lora_alpha
        ),
        database_url=await find_database(environ),
        monitor=monitor,
        service=service,
    )


def load_task_sets(config: CLIConfig, devices: PreparedDevices) -> tuple[TaskSet, TaskSet | None]:
    """Training tasks, and held-out tasks if configured; the two are disjoint."""
    is_judged, device = has_judge(config), devices.backend.abilities
    sources, eval_sources = complete_sources(config.tasks, config.devices), None
    if config.eval_tasks is not None:
        sources, eval_sources = split_sources(sources, complete_sources(config.eval_tasks, config.devices))
    train_tasks = load_tasks(sources, seed=config.seed, split="train", device=device, has_judge=is_judged)
    if eval_sources is None:
        return train_tasks, None
    held_out = load_tasks(eval_sources, seed=config.seed, split="eval", device=device, has_judge=is_judged)
    require_disjoint(train_tasks, held_out)
    return train_tasks, held_out


def run_name(config: CLIConfig) -> str:
    """The same settings give the same name, so that the same command can resume."""
    if config.log_path is not None:
        return Path(config.log_path).name
    model = "embedded-demo" if config.model_name is None else repository_of(Path(config.model_name).name)
    return f"{model}-g{config.groups_per_batch}x{config.group_size}-lr{config.learning_rate:g}-seed{config.seed}"


def log_path(config: CLIConfig) -> Path:
    """The run's folder."""
    return run_folder(config.log_path, config.log_dir, run_name(config))


def _warn_of_idle_keys(config: CLIConfig) -> None:
    if config.gbox_api_key and "gbox" not in (config.device, config.devices.coordinate_mode):
        logger.warning("gbox_api_key has no effect without device=gbox or coordinate_mode=gbox")
    if config.tinker_api_key and config.training != "tinker":
        logger.warning("tinker_api_key has no effect without training=tinker")


def check_trainer(trainer: TrainerConfig, environ: Mapping[str, str], *, is_here: bool = True) -> None:
    """Raise `ConfigError` if libraries are missing, or a trainer on other nodes could not be reached, or not safely.

    `is_here`: the run is on this machine, not planned for another.
    """
    if trainer.loader == "unsloth" and trainer.sharding not in (None, "replicated"):
        raise ConfigError(
            "trainer.sharding: expected 'replicated' with trainer.loader=unsloth, which loads the whole model onto "
            f"each GPU, got {trainer.sharding!r}; leave one of them out"
        )
    if trainer.num_nodes is None:
        if is_here:
            require_libraries(trainer.loader, trainer.kernels, has_gpu=bool(visible_gpus(environ)))
        return
    check_address("trainer.num_nodes", "trainer", trainer.gpus, environ)


def _require_free_ports(config: CLIConfig) -> None:
    ports = {
        "server": config.server.port,
        "gateway": config.gateway.port,
        "monitor": config.monitor.port,
    }
    for group, port in ports.items():
        if port is None:
            continue
        other = next(name for name, one in ports.items() if one == port)
        if other != group:
            raise ConfigError(f"{group}.port: expected another port than {other}.port, got {port} for both; change one")
        try:
            free_port(port)
        except OSError as error:
            raise ConfigError(
                f"{group}.port: expected a free port, got {port} ({error.strerror}); choose another one, or leave it "
                "out"
            ) from None


def check_learning(config: CLIConfig) -> None:
    """Raises `ConfigError` for settings that cannot be combined."""
    check_loss_config(config.loss)
    if config.kl_penalty_coef and config.loss.kl_loss_coef:
        raise ConfigError(
            f"kl_loss_coef: expected 0 where kl_penalty_coef={config.kl_penalty_coef:g} is in the reward already, got "
            f"{config.loss.kl_loss_coef:g}; set one of them"
        )
    if config.warmup_steps >= config.max_steps:
        raise ConfigError(
            f"warmup_steps: expected less than max_steps={config.max_steps}, got {config.warmup_steps}; lower it"
        )
    # off-policy tokens need a loss that bounds their importance ratio
    off_policy = {
        "max_steps_off_policy": config.max_steps_off_policy,
        "replay_successes": config.curriculum.replay_successes,
    }
    for name, value in off_policy.items():
        if value and not (config.loss.bounds_ratio or config.loss.force_untruncated):
            raise ConfigError(
                f"loss: expected one that bounds the ratio where {name}={value}, got {config.loss.name} without "
                "tis_cap or icepop_high, which collapses on old tokens; set loss=ppo, or tis_cap=2, or "
                "force_untruncated=true"
            )
    # within a step the policy moves away from the proximal one, whatever bounds that one's ratio to the sampler
    if config.num_substeps > 1 and config.loss.name == "importance_sampling" and not config.loss.force_untruncated:
        raise ConfigError(
            f"loss: expected one that clips where num_substeps={config.num_substeps}, got importance_sampling, whose "
            "ratio has no bound after the first optimizer step of a training step; set loss=ppo, or num_substeps=1, or "
            "force_untruncated=true"
        )


def check_branching(config: CLIConfig, device: DeviceAbilities) -> None:
    """Raise `ConfigError` if rollouts shall go on from turns of others and cannot."""
    is_own_agent = config.agent.name == "gbox" and config.devices.coordinate_mode == "direct"
    if config.branching.num_siblings and config.agent.name != "harness" and not (is_own_agent and device.is_repeatable):
        raise ConfigError(
            "branching.num_siblings: expected 0 unless agent=harness, or agent=gbox gives coordinates on devices that "
            f"show the same after the same actions, got {config.branching.num_siblings} with {device.name} and "
            f"agent={config.agent.name}; set it to 0"
        )


def check_workers(config: CLIConfig, environment: Environment, environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for settings of workers that cannot work."""
    if environment.check_workers is not None:
        environment.check_workers(config.rollout_workers, config.devices)
    if not config.rollout_workers:
        return
    check_cluster("rollout_workers", environ)
    gateway = config.gateway
    if gateway.port is not None or gateway.public_url is not None:
        raise ConfigError(
            "gateway: expected no port or public_url with rollout workers, which have a gateway each, got "
            f"port={gateway.port!r} and public_url={gateway.public_url!r}; leave them out: with gateway.host=0.0.0.0 "
            "agents reach each at the address of its machine and a free port"
        )
