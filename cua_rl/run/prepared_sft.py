"""Resolves and checks a supervised configuration, data included, before a model is loaded."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from pathlib import Path

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.plain_config import find_stored, plain_config
from cua_rl.database.models import Training
from cua_rl.environments.pool import DeviceBackend
from cua_rl.environments.table import find_environment
from cua_rl.machine.machine import Machine, find_machine
from cua_rl.machine.memory_parts import Request
from cua_rl.machine.memory_plan import MemoryBudget
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.renderers.images import largest_image_tokens, num_image_tokens
from cua_rl.renderers.renderer import Renderer
from cua_rl.reporting.metric_log import require_wandb
from cua_rl.reporting.step_line import num_of
from cua_rl.rl.datums import build_datums, count_retokenised, datums_sha256
from cua_rl.run.devices import find_experts, require_own_model
from cua_rl.run.prepared_training import check_trainer
from cua_rl.run.resolve import plan_trainer
from cua_rl.run.sft_config import SftConfig
from cua_rl.run_folder.checkpoints import find_checkpoint
from cua_rl.run_folder.earlier_attempt import EarlierAttempt
from cua_rl.run_folder.log_directory import run_folder
from cua_rl.run_folder.model_folder import (
    find_model,
    make_image_renderer,
    max_positions,
    pinned_name,
    repository_of,
    require_trainable,
)
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database
from cua_rl.sampling.config import ServerConfig, max_lora_rank
from cua_rl.supervised.action_accuracy import ANSWER_ROOM
from cua_rl.supervised.conversation_files import open_conversation_file
from cua_rl.supervised.datasets import Dataset, Example, ExpertExamples, FixedExamples, require_experts, split_examples
from cua_rl.supervised.recorded import load_successes
from cua_rl.task_loader import load_tasks
from cua_rl.types.actions import Action
from cua_rl.types.errors import ConfigError, DatabaseError
from cua_rl.types.rollout import Datum, ImageChunk, Rollout

EXPERT_STEPS = 100
_FIXED = (
    *("data_sha256", "model_path", "max_pixels", "lora_rank", "trainer.lora_alpha", "seed", "batch_size"),
    "num_eval_conversations",
)
"""Settings that must not change on resume, or the loss curve would be meaningless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedData:
    """Validated conversations and their description."""

    dataset: Dataset
    num_held_out: int
    sha256: str
    """Changes if what is learned from changes: a run resumes only on the data it began with."""
    description: str
    longest_tokens: int
    """Tokens of the longest conversation; with demonstrations, which are made as needed, of the first one."""
    boxes: Mapping[tuple[str, Action], tuple[int, ...]] = field(
        default_factory=dict[tuple[str, Action], tuple[int, ...]]
    )
    """Of elements that recorded actions aim at, by the sha256 of the screenshot and the action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSft:
    """A supervised configuration with all references resolved, data included."""

    config: SftConfig
    run_name: str
    log_path: Path
    renderer: Renderer
    data: OpenedData
    max_steps: int
    checkpoint_path: Path | None
    memory: MemoryBudget
    server: ServerConfig | None
    """Of the model server that gives greedy answers on held-out steps; None if there is none."""

    def effective(self) -> dict[str, object]:
        """The values that the run uses, for config.json, `dry_run` and resume checks."""
        return {
            "run_name": self.run_name,
            "log_path": str(self.log_path),
            "model_name": self.config.model_name,
            "model_path": str(self.config.trainer.model_path),
            "renderer": self.renderer.name,
            "data_description": self.data.description,
            "data_sha256": self.data.sha256,
            "num_train_conversations": self.data.dataset.num_examples,
            "num_held_out_conversations": self.data.num_held_out,
            "num_steps": self.max_steps,
            **self.memory.effective(),
        }


async def prepare_sft(
    config: SftConfig, devices: DeviceBackend, environ: Mapping[str, str] = os.environ
) -> PreparedSft:
    """Resolve the configuration; raises `ConfigError` for the first problem.

    `devices` are where experts work; they stay open as long as it is used.
    """
    require_wandb(config.wandb_project)
    if config.data == "experts":
        require_own_model(find_environment(config.tasks), config.model_name)
    model_path = find_model(config.model_name)
    config = with_values(config, model_name=pinned_name(config.model_name, model_path))
    renderer = make_image_renderer(model_path, config.renderer_name, config.max_pixels)
    require_trainable(model_path, config.lora_rank, config.trainer.lora_modules)
    check_trainer(config.trainer, environ, is_here=config.machine is None)
    checkpoint_path = find_checkpoint(
        config.load_checkpoint_path, lora_rank=config.lora_rank, lora_alpha=config.trainer.lora_alpha
    )
    longest = max_positions(model_path)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len: expected at most {longest}, the positions of {model_path.name}, got "
            f"{config.max_model_len}; leave max_model_len out"
        )
    max_tokens = config.max_model_len or longest
    data = await open_data(config, renderer, devices, environ, max_tokens=max_tokens)
    num_examples = data.dataset.num_examples
    pass_steps = EXPERT_STEPS if num_examples is None else ceil(num_examples / config.batch_size)
    max_steps = pass_steps if config.max_steps is None else config.max_steps
    if config.warmup_steps >= max_steps:
        raise ConfigError(
            f"warmup_steps: expected fewer than the {max_steps} steps of the run, got {config.warmup_steps}; lower it"
        )
    machine = find_machine(config.machine, environ, is_dry_run=config.dry_run)
    config, memory, server = _resolve(config, machine, model_path, data.longest_tokens)
    return PreparedSft(
        config=config,
        run_name=run_name(config),
        log_path=log_path(config),
        renderer=renderer,
        data=data,
        max_steps=max_steps,
        checkpoint_path=checkpoint_path,
        memory=memory,
        server=server if config.num_eval_actions else None,
    )


def _resolve(
    config: SftConfig, machine: Machine, model_path: Path, longest_tokens: int
) -> tuple[SftConfig, MemoryBudget, ServerConfig]:
    """The configuration without open choices of the trainer, and the settings of a model server beside it."""
    trainer = with_values(
        config.trainer,
        model_path=model_path,
        lora_rank=config.lora_rank,
        seed=config.seed,
        max_pixels=config.max_pixels,
    )
    has_server = config.num_eval_actions > 0
    server = ServerConfig(
        model_path=model_path,
        max_model_len=min(max_positions(model_path), longest_tokens + ANSWER_ROOM),
        max_lora_rank=max_lora_rank(config.lora_rank),
        adapts_vision=trainer.adapts_vision,
        max_pixels=config.max_pixels,
    )
    memory = plan_trainer(
        Request(
            model=load_model_sizes(model_path),
            machine=machine,
            server=server,
            trainer=trainer,
            has_server=has_server,
            context_tokens=longest_tokens,
            largest_image_tokens=largest_image_tokens(model_path, config.max_pixels) if has_server else 0,
            is_context_fixed=True,
        )
    )
    server = memory.fill_server(server) if has_server else server
    return with_values(config, trainer=memory.fill_trainer(trainer)), memory, server


def run_name(config: SftConfig) -> str:
    """The same settings give the same name, so that the same command can resume."""
    if config.log_path is not None:
        return Path(config.log_path).name
    model = "tiny" if config.model_name is None else repository_of(Path(config.model_name).name)
    weights = f"r{config.lora_rank}" if config.lora_rank else "full"
    data = f"{config.data}-{Path(config.from_run).name}" if config.from_run else Path(config.data).stem
    return f"sft-{model}-{data}-{weights}-b{config.batch_size}-lr{config.learning_rate:g}-seed{config.seed}"


def log_path(config: SftConfig) -> Path:
    """Where the run writes."""
    return run_folder(config.log_path, config.log_dir, run_name(config))


def require_same_run(prepared: PreparedSft, attempt: EarlierAttempt) -> None:
    """Raises `ConfigError` if the run began with other data or settings that its batches depend on."""
    before = attempt.settings
    now = plain_config(prepared.config) | prepared.effective()
    for name in _FIXED:
        (_, was), (_, wanted) = find_stored(before, name), find_stored(now, name)
        if was != wanted:
            raise ConfigError(
                f"{name}: expected {was!r} as when the run in {str(attempt.path)!r} began, got "
                f"{wanted!r}; keep it, or choose another log_path"
            )


async def open_data(
    config: SftConfig, renderer: Renderer, devices: DeviceBackend, environ: Mapping[str, str], *, max_tokens: int
) -> OpenedData:
    """Find and check all data; raises `ConfigError` for the first thing that cannot be learned from."""
    match config.data:
        case "experts":
            return await _open_experts(config, renderer, devices, max_tokens)
        case "rollouts":
            return await _open_rollouts(config, renderer, max_tokens, environ)
        case path:
            return await asyncio.to_thread(_open_file, config, Path(path), renderer, max_tokens)


async def _open_experts(config: SftConfig, renderer: Renderer, devices: DeviceBackend, max_tokens: int) -> OpenedData:
    abilities, experts = devices.abilities, find_experts(config.tasks)
    tasks = load_tasks(config.tasks, seed=config.seed, split="train", device=abilities)
    require_experts(tasks.task_ids, experts)
    held_out = load_tasks(config.tasks, seed=config.seed, split="eval", device=abilities)
    held_out_tasks = held_out.held_out(config.num_eval_conversations)
    dataset = ExpertExamples(
        tasks=tasks,
        held_out_tasks=held_out_tasks,
        devices=devices,
        experts=experts,
        renderer=renderer,
        error_rate=config.error_rate,
        max_turns=config.max_turns,
        seed=config.seed,
    )
    longest_tokens = _require_room(await dataset.batch(0, 1), max_tokens)
    identity = json.dumps(
        [tasks.task_ids, config.error_rate, [config.screen_scale, config.browser_scale], config.max_turns]
    )
    return OpenedData(
        dataset=dataset,
        num_held_out=len(held_out_tasks),
        sha256=sha256(identity.encode()).hexdigest(),
        description=f"demonstrations of {num_of(len(tasks.task_ids), 'task')}, error rate {config.error_rate:g}",
        longest_tokens=longest_tokens,
    )


async def _open_rollouts(
    config: SftConfig, renderer: Renderer, max_tokens: int, environ: Mapping[str, str]
) -> OpenedData:
    opened = open_run_database(config.from_run or "", environ, "from_run")
    async with opened as (database, name), database.sessions() as session:
        training_id = await find_training_id(database, name, "from_run")
        training = await session.get_one(Training, training_id)
        steps, most = config.run_steps, config.max_per_task
        successes = await load_successes(session, training_id, num_steps=steps, max_per_task=most, seed=config.seed)
    if successes.image_token_id != renderer.image_token_id:
        raise ConfigError(
            f"from_run: expected a run of a model with image token {renderer.image_token_id}, got "
            f"{successes.image_token_id}: this model has other tokens; name the model that was recorded"
        )
    examples = await asyncio.to_thread(build_recorded_examples, successes.rollouts, renderer.image_token_id)
    datums = [datum for example in examples for datum in example]
    require_recorded_size([chunk for datum in datums for chunk in datum.model_input.image_chunks], renderer)
    longest_tokens = _require_room(datums, max_tokens)
    keys = [(rollout.task_id, rollout.seed) for rollout in successes.rollouts]
    train, held_out = split_examples(keys, config.num_eval_conversations, config.seed)
    num_tasks = len({rollout.task_id for rollout in successes.rollouts})
    return OpenedData(
        dataset=FixedExamples(load=lambda i: examples[i], train=train, held_out_indices=held_out, seed=config.seed),
        num_held_out=len(held_out),
        sha256=datums_sha256(datums),
        description=f"{num_of(len(examples), 'recorded success', 'recorded successes')} of {num_of(num_tasks, 'task')} "
        f"in run {training.run_name!r} "
        f"(of {successes.num_successes}, {successes.num_repeats} of them repeats)",
        longest_tokens=longest_tokens,
        boxes={
            (turn.agent.before.sha256, turn.agent.action): turn.agent.target_box
            for rollout in successes.rollouts
            for turn in rollout.turns
            if turn.agent.target_box and turn.agent.before is not None and turn.agent.action is not None
        },
    )


def build_recorded_examples(rollouts: Sequence[Rollout], image_token_id: int) -> list[Example]:
    """The training sequences of recorded rollouts; raises `DatabaseError` unless they hold the sampled tokens."""
    examples = [build_datums(rollout, 1.0, image_token_id).datums for rollout in rollouts]  # weights of 1
    num_retokenised = count_retokenised([datum for example in examples for datum in example], rollouts, image_token_id)
    if num_retokenised:
        raise DatabaseError(f"expected the sampled tokens in every sequence, got {num_retokenised} other ones")
    return examples


def require_recorded_size(screenshots: Sequence[ImageChunk], renderer: Renderer) -> None:
    """Raise `ConfigError` if the trainer would scale recorded screenshots to another size than the sampler did."""
    settings = renderer.image_settings
    assert settings is not None, "expected a renderer for a model that sees screenshots"
    for chunk in screenshots:
        width_px, height_px = chunk.image.width_px, chunk.image.height_px
        num_tokens = num_image_tokens(width_px, height_px, settings)
        if num_tokens != chunk.expected_tokens:
            raise ConfigError(
                f"max_pixels: expected screenshots of {width_px}x{height_px} pixels in {chunk.expected_tokens} tokens, "
                f"as they were recorded, got {num_tokens} with at most {settings.max_pixels} pixels; set max_pixels to "
                "the recorded run's server.max_pixels"
            )


def _open_file(config: SftConfig, path: Path, renderer: Renderer, max_tokens: int) -> OpenedData:
    file = open_conversation_file(path.expanduser().absolute(), renderer, max_tokens=max_tokens)
    hashes = [line.content_sha256 for line in file.lines]
    train, held_out = split_examples(hashes, config.num_eval_conversations, config.seed)

    def load(index: int) -> Example:
        return (file.load(index),)

    return OpenedData(
        dataset=FixedExamples(load=load, train=train, held_out_indices=held_out, seed=config.seed),
        num_held_out=len(held_out),
        sha256=sha256("".join(hashes).encode()).hexdigest(),
        description=f"{len(hashes)} conversations in {path}",
        longest_tokens=max(line.num_tokens for line in file.lines),
    )


def _require_room(datums: Sequence[Datum], max_tokens: int) -> int:
    """The length of the longest conversation; raises `ConfigError` if that is too much."""
    longest = max(datum.model_input.length for datum in datums)
    if longest > max_tokens:
        raise ConfigError(
            f"max_model_len: expected conversations of at most {max_tokens} tokens, got one of {longest}; raise "
            "max_model_len if the model can hold more, or choose other data"
        )
    return longest
