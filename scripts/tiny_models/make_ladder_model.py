"""Make the model of the ladder from the tiny model: `python -m scripts.tiny_models.make_ladder_model`.

It gets tokens for the words and labels of all demo tasks; its vision tower learns to locate elements and to read digits
on every screen that they lead to; then all weights imitate an expert that names the next target, scans the screen for
it, and taps it or swipes on. That loses the digits: the tower learns them once more, and the language model alone goes
on imitating; last and briefly, an expert that now and then seeks something else, which reinforcement learning can undo.
"""

import asyncio
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

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

    output_path: Path = setting(
        Path("ladder_stages"), "folder for the model of each stage; must not exist, or be empty"
    )
    model_path: Path = setting(TINY_QWEN3_VL, "the tiny model to start from, or one that this command made")
    seed: int = setting(0, "seed of weights and lessons")
    grounding_steps: int = setting(1600, "steps of training the vision tower alone; 0 if model_path is of this command")
    num_steps: int = setting(2400, "steps of imitation by all weights")
    digit_steps: int = setting(1350, "further steps of training the vision tower alone, after those")
    language_steps: int = setting(1000, "further steps of imitation, by the language model")
    imperfect_steps: int = setting(100, "steps of imitating an expert that errs, by the language model")
    lora_rank: int = setting(64, "rank of the language model's update in each of these two stages")
    error_rate: float = setting(0.2, "probability per turn that it errs")
    tasks_seen: int = setting(8, "tasks per step with screenshots")
    screens: int = setting(8, "screens per step on which two elements are sought")
    readings: int = setting(8, "screens per step about which a few questions are asked")
    tasks_told: int = setting(16, "tasks per step without screenshots: what comes next, and texts to copy")
    copies: int = setting(4, "conversations per step without screenshots in which eight names and texts are repeated")
    learning_rate: float = setting(1e-3, "peak learning rate, twice that for the language model alone; linear decay")
    eval_every: int = setting(250, "steps between evaluations")
    eval_tasks: int = setting(24, "held-out tasks of each level per evaluation")
    num_threads: int | None = setting(None, "threads of the trainer; None is one per core")


async def main(config: LadderModelConfig) -> None:
    """Make the model, stage by stage, and print progress."""
    folder = await asyncio.to_thread(new_folder, "output_path", str(config.output_path))
    folder.mkdir(parents=True, exist_ok=True)
    model = config.model_path
    if config.grounding_steps:
        arguments, model = (model, folder / "grounded", config.seed, "ladder"), folder / "grounded"
        await run_stage("scripts.tiny_models.extended_model", *arguments, scratch=folder)
        await _ground(model, config.seed, config.grounding_steps)
    renderer = make_renderer(model)
    teach = partial(
        imitate,
        seed=config.seed,
        num_threads=config.num_threads,
        evaluate=partial(_evaluate, await _held_out_datums(config, renderer)),
        is_evaluated=lambda num_done: num_done % config.eval_every == 0,
    )
    perfect, imperfect = (partial(draw, config, renderer) for draw in (_draw_batch, _draw_imperfect_batch))

    async def teach_language(stage: str, **how: Any) -> Path:
        adapter = folder / f"{stage}_adapter"
        await teach(model, adapter, lora_rank=config.lora_rank, **how)
        await run_stage("scripts.tiny_models.merged_model", model, adapter, folder / stage, scratch=folder)
        return folder / stage

    if steps := config.num_steps:
        rate = partial(_slowly_falling, config.learning_rate, steps)
        await teach(model, folder / "imitating", num_steps=steps, draw_batch=perfect, learning_rate=rate)
        model = folder / "imitating"
    if config.digit_steps:
        model = Path(shutil.copytree(model, folder / "reading"))
        await _ground(model, config.seed + 1, config.digit_steps)
    if steps := config.language_steps:
        rate = partial(_slowly_falling, 2 * config.learning_rate, steps)
        model = await teach_language("answering", num_steps=steps, draw_batch=perfect, learning_rate=rate)
    if steps := config.imperfect_steps:

        def falling(step: int) -> float:
            return config.learning_rate * (1 - step / steps)

        model = await teach_language("erring", num_steps=steps, draw_batch=imperfect, learning_rate=falling)
    print(f"saved {model}")


async def _ground(model: Path, seed: int, num_steps: int) -> None:
    await run_stage("scripts.tiny_models.grounding", model, seed, num_steps, "ladder", scratch=model.parent)


def _slowly_falling(peak: float, num_steps: int, step: int) -> float:
    """Linear decay to a tenth over the last third."""
    return peak * min(1.0, max(0.1, 3 - 3 * step / num_steps))


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
        for template in random.sample(templates, min(len(templates), config.eval_tasks)):
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
