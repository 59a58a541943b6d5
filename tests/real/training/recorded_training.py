"""A recorded run of the random tiny model in this process: all of it is real, but its rollouts are invented."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.plain_config import plain_config
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import Recorder, TrainingStarted, TurnTaken
from cua_rl.rl import async_loop, sync_loop
from cua_rl.rl.config import LoopConfig
from cua_rl.rl.served_policy import ServedPolicy
from cua_rl.rl.stages import LoopParts, LoopSettings
from cua_rl.rollout.limit import RolloutLimit
from cua_rl.rollout.run import RolloutJob
from cua_rl.run.recording import recorded
from cua_rl.run_folder.log_directory import Checkpoint, prepare_log_directory
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.rollout import Datum, EncodedTextChunk, ModelInput, Rollout, SamplingParams
from tests.builders import model_turn, rollout, turn
from tests.real.training.tiny_qwen3_vl import (
    FIRST_TEXT_ID,
    IMAGE_PAD,
    VISION_END,
    VISION_START,
    draw_screenshot,
    image_chunk,
)
from tests.real.training.trainer_calls import LocalTrainer
from tests.rl.test_sync_loop import Log, Seeds

NUM_STEPS = 4
ROW_TOKENS = 96
"""Two or three of the sequences to a row."""
_PARAMS = SamplingParams(max_tokens=8, temperature=1.0)
_SCREENS = [draw_screenshot(random.Random(number)) for number in range(4)]
"""Few, so that steps share them."""


def loop_config(**changes: Any) -> LoopConfig:
    """Four steps of two groups of three, each with a checkpoint that stays."""
    values: dict[str, Any] = {
        "max_steps": NUM_STEPS,
        "groups_per_batch": 2,
        "group_size": 3,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "learning_rate_schedule": "linear",
        "eval_every": 0,
        "save_every": 1,
        "trainer": TrainerConfig(lora_alpha=8, max_restarts=0),
        "adam": OptimConfig(weight_decay=0.01),
        "loss": LossConfig(name="importance_sampling"),
    }
    return LoopConfig(**values | changes)


def open_local(config: TrainerConfig) -> Any:
    """A trainer in this process, as `run.replay` asks for one."""

    @asynccontextmanager
    async def opened() -> AsyncGenerator[LocalTrainer]:
        yield LocalTrainer(await asyncio.to_thread(Trainer, config))

    return opened()


class InventedRollouts:
    """Answers of random tokens to screenshots that tasks share, with the trainer's own log-probabilities and noise."""

    def __init__(self, trainer: LocalTrainer, recorder: Recorder) -> None:
        self._trainer, self._recorder = trainer, recorder

    async def run(self, job: RolloutJob) -> Rollout:
        rng = random.Random(f"{job.source.step}/{job.group_index}/{job.member_index}")
        await self._recorder.record(job.started("device-0", 9))
        chunks: list[Any] = []
        models: list[Any] = []
        for index in range(1 + job.member_index % 2):
            chunks.append(EncodedTextChunk(tokens=(*_tokens(rng, 4), VISION_START)))
            chunks += [image_chunk(rng.choice(_SCREENS)), EncodedTextChunk(tokens=(VISION_END,))]
            prompt, sampled = ModelInput(chunks=tuple(chunks)), _tokens(rng, rng.randint(2, 6))
            logprobs = [one + rng.gauss(0.0, 0.05) for one in await self._logprobs(prompt, sampled)]
            version = self._trainer.policy_version
            models.append(model_turn(prompt, sampled, logprobs, version, f"{job.rollout_id}-{index}"))
            chunks.append(EncodedTextChunk(tokens=sampled))
            await self._recorder.record(TurnTaken(rollout_id=job.rollout_id, turn=turn(index, models[-1])))
        made = rollout(
            *models,
            reward=float(job.member_index == job.group_index % 3),
            rollout_id=job.rollout_id,
            member_index=job.member_index,
        )
        return made

    async def _logprobs(self, prompt: ModelInput, sampled: Sequence[int]) -> Sequence[float]:
        mask = (*[False] * prompt.length, *[True] * len(sampled))
        asked = Datum(
            rollout_id="asked",
            model_input=ModelInput(chunks=(*prompt.chunks, EncodedTextChunk(tokens=tuple(sampled)))),
            loss_mask=mask,
            advantages=tuple(map(float, mask)),
            sampling_logprobs=(0.0,) * len(mask),
            policy_versions=(0,),
            turn_indices=(0,),
        )
        return (await self._trainer.forward([asked]))[0][-len(sampled) :]


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TEXT_ID, 320) for _ in range(count))


async def record_training(folder: Path, model_path: Path, url: str, config: LoopConfig) -> Mapping[str, Any]:
    """Train and record a run in `folder`; returns its settings."""
    trainer_config = with_values(
        config.trainer, model_path=model_path, lora_rank=config.lora_rank, seed=config.seed, parity_limit=10.0
    )
    config = with_values(config, trainer=with_values(trainer_config, micro_batch_tokens=ROW_TOKENS))
    stored = plain_config(config) | {
        "run_name": folder.name,
        "log_path": str(folder),
        "model_path": str(model_path),
        "model_name": str(model_path),
        "parity_limit": 0.5,
    }

    async def nothing(*_: object) -> None:
        return None

    with prepare_log_directory(folder, "overwrite") as log:
        log.write_config(stored)
        trainer = LocalTrainer(Trainer(config.trainer))
        policy = ServedPolicy(
            trainer=trainer,
            make_canary=nothing,
            load_and_prove=nothing,
            state_path=log.state_path,
            sampler_path=log.sampler_path,
            record_checkpoint=lambda step, state, sampler, _: log.record_checkpoint(
                Checkpoint(step=step, state_path=state, sampler_path=sampler)
            ),
        )
        started = TrainingStarted(
            run_name=folder.name, log_path=str(folder), config=stored, first_step=1, total_steps=config.max_steps
        )
        async with DatabaseRecorder(url, image_token_id=IMAGE_PAD) as recorder, recorded(recorder, started):
            settings = LoopSettings(config=config, params=_PARAMS, image_token_id=IMAGE_PAD)
            parts = LoopParts(
                tasks=Seeds(),
                runner=InventedRollouts(trainer, recorder),
                trainer=trainer,
                policy=policy,
                evaluator=None,
                recorder=recorder,
                log=Log(),
            )
            if config.max_steps_off_policy:
                limit = RolloutLimit(largest=12)
                await async_loop.train(settings, parts, max_lag=config.max_steps_off_policy, limit=limit)
            else:
                await sync_loop.train(settings, parts)
    return json.loads((folder / "config.json").read_text())
