"""Five training steps of our recipe on the same datums, by a trainer of its own or on a Tinker service.

`python -m tests.real.tinker.same_training PACKAGES ADDRESS FOLDER` takes them on the service at ADDRESS, with the SDK's
packages behind our own and the key in TINKER_API_KEY.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.rl.config import LoopConfig
from cua_rl.rl.datums import Batch
from cua_rl.rl.train_step import Trainer, train_step
from cua_rl.supervised.demonstrations import build_supervised_datum
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, TrainerConfig
from cua_rl.types.rollout import AdapterRef, Datum, ImageChunk
from scripts.tiny_models.lessons import Mix, draw_lesson

NUM_STEPS = 5
NUM_ROLLOUTS = 4
TRAINER = TrainerConfig(
    model_path=TINY_QWEN3_VL, lora_rank=16, seed=7, dtype="float32", parity_limit=1e3, max_restarts=0
)
"""The parity gate would stop the run: nobody has sampled these rollouts."""
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "importance_sampling": {"name": "importance_sampling", "normalisation": "token_mean"},
    "ppo": {"name": "ppo", "clip_low": 0.5},
    # as the service computes it: log-probabilities of all text, not of answers alone; and the weight of a token is
    # 1 / (4 * 1024), which rounds nothing that is multiplied by it
    "all_text": {"name": "importance_sampling", "normalisation_tokens": 1024},
}


class Saving(Trainer, Protocol):
    """What the steps ask of a trainer."""

    async def save_state(self, path: Path) -> None: ...

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef: ...


async def draw_batches(renderer: Renderer, case: str) -> list[Batch]:
    """Demonstrations on simulated phones as if a policy had sampled them, some good, some bad."""
    random = Random(0)
    mix = Mix(listing_share=0.0, whole_share=1.0, error_rate=0.5)

    async def rollout(name: str) -> Datum:
        datum = build_supervised_datum(renderer, await draw_lesson(random, mix), name=name)
        advantage = random.gauss(0.0, 1.0)
        is_image = [isinstance(chunk, ImageChunk) for chunk in datum.model_input.chunks for _ in range(chunk.length)]
        return replace(
            datum,
            loss_mask=(False, *(not one for one in is_image[1:])) if case == "all_text" else datum.loss_mask,
            advantages=tuple(advantage if on else 0.0 for on in datum.loss_mask),
            sampling_logprobs=tuple(-random.random() if on else 0.0 for on in datum.loss_mask),
        )

    return [
        Batch(
            datums=tuple([await rollout(f"{step}-{place}") for place in range(NUM_ROLLOUTS)]),
            num_rollouts=NUM_ROLLOUTS,
            metrics={},
        )
        for step in range(NUM_STEPS)
    ]


async def take_steps(trainer: Saving, renderer: Renderer, case: str, folder: Path) -> None:
    """Write a state after the first step, the adapter after the last, and the gradients' norms to `folder`."""
    config = LoopConfig(loss=LossConfig(**LOSSES[case]), learning_rate=1e-3, trainer=TRAINER)
    norms: list[float] = []
    for step, batch in enumerate(await draw_batches(renderer, case), start=1):
        result = await train_step(trainer, batch, config, step=step, max_steps=NUM_STEPS)
        norms.append(result.metrics["optim/grad_norm"])
        if step == 1:
            await trainer.save_state(folder / "state")
    await trainer.save_weights_for_sampler(folder / "adapter")
    (folder / "norms.json").write_text(json.dumps(norms))


async def train_natively(folder: Path) -> None:
    """All cases, each from the same start."""
    renderer = make_renderer(TINY_QWEN3_VL)
    async with TrainingClient(TRAINER, folder / "trainer.log") as trainer:
        await trainer.save_state(folder / "start")
        for case in LOSSES:
            await trainer.load_state(folder / "start")
            await take_steps(trainer, renderer, case, folder / case)


async def train_on_service(address: str, folder: Path) -> None:
    """All cases, each with a session and a model of its own."""
    from cua_rl.run.tinker import TinkerService, open_tinker
    from cua_rl.sampling.server import ServedModel

    renderer = make_renderer(TINY_QWEN3_VL)
    model = ServedModel(name=str(TINY_QWEN3_VL), max_model_len=2048)
    service = TinkerService(address=address, api_key=os.environ["TINKER_API_KEY"], model=model)
    for case in LOSSES:
        async with open_tinker(service, TRAINER, renderer) as (trainer, _):
            await take_steps(trainer, renderer, case, folder / case)


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    asyncio.run(train_on_service(sys.argv[2], Path(sys.argv[3])))
