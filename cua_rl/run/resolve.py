"""Chooses what a training configuration leaves open: replaces each None by what the run uses."""

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cua_rl.command_line.fields import with_values
from cua_rl.environments.table import DEFAULT_DEVICE, find_environment
from cua_rl.machine.machine import Machine
from cua_rl.machine.memory_parts import Request
from cua_rl.machine.memory_plan import MemoryBudget, plan_memory
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.renderers.families import find_family
from cua_rl.renderers.images import largest_image_tokens
from cua_rl.run.preflight import rollout_shape
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.model_folder import find_max_model_len
from cua_rl.sampling.config import ServerConfig, max_lora_rank
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError

FLOAT32_ROUNDING = 0.02
"""Nats: float32 differs by 1e-5 on average, a wrong model by whole nats."""
STATUS_BAR = 0.06
"""Share of an Android screen: 24 dp of at least 800, or up to 52 dp beside a camera."""


def resolve(config: CLIConfig, machine: Machine, model_path: Path) -> tuple[CLIConfig, MemoryBudget]:
    """The configuration of a run of this model on this machine, and the memory that it takes.

    Depends only on its arguments and the model's folder. Raises `ConfigError` for what cannot fit.
    """
    max_model_len = find_max_model_len(model_path, config.server.max_model_len, max_tokens=config.max_tokens)
    image_tokens = largest_image_tokens(model_path, config.server.max_pixels)
    server = with_values(
        config.server,
        model_path=model_path,
        max_model_len=max_model_len,
        max_lora_rank=max_lora_rank(config.lora_rank),
        adapts_vision=config.trainer.adapts_vision,
    )
    trainer = with_values(
        config.trainer,
        model_path=model_path,
        lora_rank=config.lora_rank,
        seed=config.seed,
        max_pixels=config.server.max_pixels,
    )
    memory = plan_trainer(
        Request(
            model=load_model_sizes(model_path),
            machine=machine,
            server=server,
            trainer=trainer,
            has_server=config.base_url is None,
            has_trainer=config.training == "local",
            context_tokens=max_model_len,
            largest_image_tokens=image_tokens,
            num_rollouts=config.max_concurrent_rollouts,
            shape=rollout_shape(config, max_model_len, image_tokens),
            num_trained=config.groups_per_batch * config.group_size,
        )
    )
    server, trainer = memory.fill_server(server), memory.fill_trainer(trainer)
    config = with_values(config, server=server, trainer=trainer, max_concurrent_rollouts=memory.num_rollouts)
    if trainer.parity_limit is None:
        config = with_values(config, trainer=with_values(trainer, parity_limit=rounding_limit(config)))
    return with_values(config, credit=with_values(config.credit, moving_top=moving_top(config))), memory


def moving_top(config: CLIConfig) -> float:
    """The share of screenshots that is not compared: that of the status bar on real Android devices."""
    is_real = config.device != DEFAULT_DEVICE or find_environment(config.tasks, config.device).is_hosted
    default = STATUS_BAR if is_real and config.box_type == "android" else 0.0
    return default if config.credit.moving_top is None else config.credit.moving_top


class EngineSettings(Protocol):
    """The part of a configuration that is about trainer and model server."""

    @property
    def trainer(self) -> TrainerConfig: ...

    @property
    def server(self) -> ServerConfig: ...

    @property
    def base_url(self) -> str | None: ...


def rounding_limit(config: EngineSettings) -> float:
    """Mean absolute difference of sampler and trainer log-probabilities that rounding can explain, nats."""
    trainer, server = config.trainer, config.server
    # whether other nodes have GPUs is not known here
    trains_on_cpu = not trainer.gpu_names and trainer.num_nodes is None
    trains_exactly = trainer.dtype == "float32" or (trainer.dtype == "auto" and trains_on_cpu)
    family = find_family(server.model_path)
    assert family is not None, "other models have been refused"
    served_in = family.cpu_dtype if server.dtype == "auto" and not server.gpu_names else server.dtype
    serves_exactly = served_in == "float32" and not config.base_url  # an external server does not say
    return FLOAT32_ROUNDING if trains_exactly and serves_exactly else family.half_rounding


def plan_trainer(request: Request) -> MemoryBudget:
    """The memory of what the run starts; its trainer may be on other nodes. Raises `ConfigError` if it cannot fit."""
    trainer, is_here = request.trainer, request.has_trainer and request.trainer.num_nodes is None
    if trainer.loader == "unsloth":  # loads the whole model onto each GPU
        trainer = with_values(trainer, sharding="replicated")
    if trainer.gradient_checkpointing is None and not is_here:
        trainer = with_values(trainer, gradient_checkpointing=True)  # the memory of other nodes is not known here
    memory = plan_memory(replace(request, trainer=trainer, has_trainer=is_here))
    num_processes = memory.gpus.num_trainer_processes
    if is_here and num_processes % trainer.context_parallel:
        raise ConfigError(
            f"trainer.context_parallel: expected a divisor of the {num_processes} trainer processes, got "
            f"{trainer.context_parallel}; change it, or trainer.num_processes"
        )
    if is_here and trainer.sharding == "hybrid":
        raise ConfigError(
            "trainer.sharding: expected 'full' on one machine, got 'hybrid', which is for trainer.num_nodes; set "
            "trainer.sharding=full"
        )
    return memory
