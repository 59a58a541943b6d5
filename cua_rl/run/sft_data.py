"""From what the user asked for to conversations to learn from: experts, recorded successes, or a file."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cua_rl.devices.pool import DeviceBackend
from cua_rl.errors import ConfigError, DatabaseError
from cua_rl.renderers.renderer import Renderer
from cua_rl.rl.datums import build_datums, count_retokenised, datums_sha256
from cua_rl.run.device_backends import make_experts
from cua_rl.run.sft_config import SftConfig
from cua_rl.supervised.conversation_files import open_conversation_file
from cua_rl.supervised.datasets import Dataset, Example, ExpertExamples, FixedExamples, require_experts, split_examples
from cua_rl.task_loader import load_tasks
from cua_rl.types import Datum, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedData:
    """Conversations that have been checked, and what to say about them."""

    dataset: Dataset
    num_held_out: int
    sha256: str
    """Changes if what is learned from changes: a run resumes only on the data it began with."""
    description: str


async def open_data(
    config: SftConfig, renderer: Renderer, devices: DeviceBackend, *, max_tokens: int, database_url: str | None
) -> OpenedData:
    """Find and check all data; raises `ConfigError` for the first thing that cannot be learned from."""
    match config.data:
        case "experts":
            return await _open_experts(config, renderer, devices, max_tokens)
        case "rollouts":
            return await _open_rollouts(config, renderer, max_tokens, database_url)
        case path:
            return await asyncio.to_thread(_open_file, config, Path(path), renderer, max_tokens)


async def _open_experts(config: SftConfig, renderer: Renderer, devices: DeviceBackend, max_tokens: int) -> OpenedData:
    abilities, experts = devices.abilities, make_experts(config)
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
    _require_room(await dataset.batch(0, 1), max_tokens)
    identity = json.dumps([tasks.task_ids, config.error_rate, _screen(config), config.max_turns])
    return OpenedData(
        dataset=dataset,
        num_held_out=len(held_out_tasks),
        sha256=sha256(identity.encode()).hexdigest(),
        description=f"demonstrations of {len(tasks.task_ids)} tasks, error rate {config.error_rate:g}",
    )


def _screen(config: SftConfig) -> list[float | None]:
    return [config.screen_scale, config.browser_scale]


async def _open_rollouts(
    config: SftConfig, renderer: Renderer, max_tokens: int, database_url: str | None
) -> OpenedData:
    # SQLAlchemy takes long to import: only who reads a database pays for it
    from cua_rl.supervised.recorded import Choice, load_successes, open_recorded_run

    choice = Choice(num_steps=config.run_steps, max_per_task=config.max_per_task, seed=config.seed)
    async with open_recorded_run(config.from_run or "", database_url) as (session, training):
        successes = await load_successes(session, training.training_id, choice)
    if successes.image_token_id != renderer.image_token_id:
        raise ConfigError(
            f"from_run: expected a run of a model with image token {renderer.image_token_id}, got "
            f"{successes.image_token_id}: its tokens mean nothing to this model; name the model that was recorded"
        )
    examples = await asyncio.to_thread(build_recorded_examples, successes.rollouts, renderer.image_token_id)
    datums = [datum for example in examples for datum in example]
    _require_room(datums, max_tokens)
    keys = [(rollout.task_id, rollout.seed) for rollout in successes.rollouts]
    train, held_out = split_examples(keys, config.num_eval_conversations, config.seed)
    num_tasks = len({rollout.task_id for rollout in successes.rollouts})
    return OpenedData(
        dataset=FixedExamples(load=lambda i: examples[i], train=train, held_out_indices=held_out, seed=config.seed),
        num_held_out=len(held_out),
        sha256=datums_sha256(datums),
        description=f"{len(examples)} recorded successes of {num_tasks} tasks in run {training.run_name!r} "
        f"(of {successes.num_successes}, {successes.num_repeats} of them repeats)",
    )


def build_recorded_examples(rollouts: Sequence[Rollout], image_token_id: int) -> list[Example]:
    """The training sequences of recorded rollouts; raises `DatabaseError` unless they hold the sampled tokens."""
    examples = [build_datums(rollout, 0.0, image_token_id).datums for rollout in rollouts]
    num_retokenised = count_retokenised([datum for example in examples for datum in example], rollouts, image_token_id)
    if num_retokenised:
        raise DatabaseError(f"expected the sampled tokens in every sequence, got {num_retokenised} other ones")
    return examples


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
    )


def _require_room(datums: Sequence[Datum], max_tokens: int) -> None:
    longest = max(datum.model_input.length for datum in datums)
    if longest > max_tokens:
        raise ConfigError(
            f"max_model_len: expected conversations of at most {max_tokens} tokens, got one of {longest}; raise "
            "max_model_len if the model can hold more, or choose other data"
        )
