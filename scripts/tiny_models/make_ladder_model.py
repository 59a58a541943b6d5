"""Make the model of the ladder from the tiny model: `python -m scripts.tiny_models.make_ladder_model`.

It gets tokens for the words and labels of all demo tasks; its vision tower learns to locate elements on every screen
that they lead to; then all weights imitate an expert that names the next target, scans the screen for it, and taps it
or swipes on; and, briefly, one that now and then seeks something else, which reinforcement learning can undo.
"""

import asyncio
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from random import Random

import chz

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.run_folder.log_directory import new_folder
from cua_rl.supervised.demonstrations import build_supervised_datum
from cua_rl.training.client import TrainingClient
from cua_rl.types.rollout import Datum
from scripts.tiny_models.imitation import imitate, run_stage
from scripts.tiny_models.ladder_lessons import (
    NUM_SEEDS,
    demonstrate_on,
    draw_copies,
    draw_reading,
    draw_search,
    draw_template,
    without_sight,
)


@chz.chz
class LadderModelConfig:
    """How the model is made."""

    output_path: Path = setting(Path("ladder_qwen3_vl"), "folder for the trained model; must not exist, or be empty")
    model_path: Path = setting(TINY_QWEN3_VL, "the tiny model to start from, or one that this command made")
    seed: int = setting(0, "seed of weights and lessons")
    grounding_steps: int = setting(1600, "steps of training the vision tower alone; 0 if model_path is of this command")
    num_steps: int = setting(2400, "steps of imitation")
    imperfect_steps: int = setting(100, "steps of imitating an expert that errs")
    error_rate: float = setting(0.2, "probability per turn that it errs")
    tasks_seen: int = setting(8, "tasks per step with screenshots")
    screens: int = setting(8, "screens per step on which two elements are sought")
    readings: int = setting(8, "screens per step about which a few questions are asked")
    tasks_told: int = setting(16, "tasks per step without screenshots: what comes next, and texts to copy")
    copies: int = setting(4, "conversations per step without screenshots in which eight names and texts are repeated")
    learning_rate: float = setting(1e-3, "peak learning rate; warm-up and decay are linear")
    eval_every: int = setting(250, "steps between evaluations")
    eval_tasks: int = setting(24, "held-out tasks of each level per evaluation")
    num_threads: int | None = setting(None, "threads of the trainer; None is one per core")


async def main(config: LadderModelConfig) -> None:
    """Make the model and print progress."""
    output_path = await asyncio.to_thread(new_folder, "output_path", str(config.output_path))
    with tempfile.TemporaryDirectory(prefix="cua_rl_ladder_model_") as folder:
        scratch, start = Path(folder), config.model_path
        if config.grounding_steps:
            start = scratch / "grounded"
            arguments = (config.model_path, start, config.seed, "ladder")
            await run_stage("scripts.tiny_models.extended_model", *arguments, scratch=scratch)
            arguments = (start, config.seed, config.grounding_steps, "ladder")
            await run_stage("scripts.tiny_models.grounding", *arguments, scratch=scratch)
        renderer = make_renderer(start)
        held_out = await _held_out_datums(config, renderer)
        teach = partial(
            imitate,
            output_path=output_path,
            seed=config.seed,
            num_threads=config.num_threads,
            evaluate=partial(_evaluate, held_out),
            is_evaluated=lambda num_done: num_done % config.eval_every == 0,
        )
        if config.num_steps:
            await teach(
                start,
                num_steps=config.num_steps,
                draw_batch=partial(_draw_batch, config, renderer),
                # linear decay to a tenth over the last third
                learning_rate=lambda step: config.learning_rate * min(1.0, max(0.1, 3 - 3 * step / config.num_steps)),
            )
            start = output_path
        if config.imperfect_steps:
            await teach(
                start,
                num_steps=config.imperfect_steps,
                draw_batch=partial(_draw_imperfect_batch, config, renderer),
                learning_rate=lambda step: config.learning_rate * (1 - step / config.imperfect_steps) / 3,
            )
    print(f"saved {config.output_path}")


async def _draw_batch(config: LadderModelConfig, renderer: Renderer, step: int) -> list[Datum]:
    random = Random(f"{config.seed}-{step}")
    teach = partial(build_supervised_datum, renderer, name=str(step))

    def draw_task() -> tuple[int, TaskTemplate]:
        return random.randrange(NUM_SEEDS), draw_template(random)

    seen = [teach(await demonstrate_on(*draw_task())) for _ in range(config.tasks_seen)]
    sought = [teach(await draw_search(random)) for _ in range(config.screens)]
    sought += [teach(await draw_reading(random)) for _ in range(config.readings)]
    told = [teach(await demonstrate_on(*draw_task(), is_seen=False)) for _ in range(config.tasks_told)]
    told += [teach(await draw_copies(random)) for _ in range(config.copies)]
    return [*seen, *sought, *(without_sight(datum, renderer) for datum in told)]


async def _draw_imperfect_batch(config: LadderModelConfig, renderer: Renderer, step: int) -> list[Datum]:
    random = Random(f"imperfect-{config.seed}-{step}")
    lessons = [
        await demonstrate_on(random.randrange(NUM_SEEDS), draw_template(random), error_rate=config.error_rate)
        for _ in range(2 * config.tasks_seen)
    ]
    lessons += [await draw_search(random) for _ in range(config.screens)]
    lessons += [await draw_reading(random) for _ in range(config.readings)]
    return [build_supervised_datum(renderer, lesson, name=str(step)) for lesson in lessons]


async def _held_out_datums(config: LadderModelConfig, renderer: Renderer) -> dict[int, list[Datum]]:
    """By level, demonstrations of any tasks on phones that training never draws."""
    random, datums = Random(f"held-out-{config.seed}"), dict[int, list[Datum]]()
    for level in sorted({template.level for template in TEMPLATES.values()}):
        templates = [template for template in TEMPLATES.values() if template.level == level]
        for template in random.sample(templates, config.eval_tasks):
            lesson = await demonstrate_on(NUM_SEEDS + random.randrange(NUM_SEEDS), template)
            datums.setdefault(level, []).append(build_supervised_datum(renderer, lesson, name=template.task_id))
    return datums


async def _evaluate(held_out: dict[int, list[Datum]], client: TrainingClient) -> str:
    """Per level, the share of demonstrations whose every token is more likely than not."""
    shares: list[str] = []
    for level, datums in held_out.items():
        rows = await client.forward(datums)
        share = sum(min(row) > math.log(0.5) for row in rows) / len(rows)
        shares.append(f"level_{level}={share:.2f}")
    return " ".join(shares)


if __name__ == "__main__":
    sys.exit(run_recipe(LadderModelConfig, main))
