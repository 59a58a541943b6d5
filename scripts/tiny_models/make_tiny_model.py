"""Make a tiny model like the included one, from random weights: `python -m scripts.tiny_models.make_tiny_model`.

Its lessons come from scripted experts on the phone simulator. The vision tower first learns to locate elements; then
the model imitates a perfect expert, naming and pointing, until it is right; then, briefly, an expert that errs. The
last stage leaves a policy that succeeds sometimes and explores: what reinforcement learning starts from.
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
from cua_rl.environments.phone.demo.templates import EMBEDDED_EVAL
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.run_folder.log_directory import new_folder
from cua_rl.supervised.demonstrations import build_supervised_datum
from cua_rl.training.client import TrainingClient
from cua_rl.types.rollout import Datum
from scripts.tiny_models.imitation import imitate, run_stage
from scripts.tiny_models.lessons import NUM_SEEDS, Mix, demonstrate_task, draw_lesson, draw_text_lesson


@chz.chz
class TinyModelConfig:
    """How the model is made. The included one took several consecutive runs with other shares of lessons."""

    output_path: Path = setting(Path("tiny_qwen3_vl"), "folder for the trained model; must not exist, or be empty")
    model_path: Path | None = setting(None, "model folder to start from; None starts from random weights")
    seed: int = setting(0, "seed of weights and lessons")
    grounding_steps: int = setting(300, "steps of training the vision tower alone, without model_path")
    perfect_steps: int = setting(700, "steps on demonstrations of a perfect expert")
    imperfect_steps: int = setting(80, "steps on demonstrations of an expert that errs")
    error_rate: float = setting(0.5, "probability per turn that this expert acts on a random element")
    batch_size: int = setting(16, "lessons per step")
    text_lessons: int = setting(32, "additional lessons per step, with the screen given as text")
    learning_rate: float = setting(1e-3, "peak learning rate; warm-up and decay are linear")
    listing_share: float = setting(0.35, "share of lessons that only list the elements of the screen")
    whole_share: float = setting(0.3, "share of tasks demonstrated to their end, not only to the last click")
    eval_every: int = setting(100, "steps between evaluations")
    eval_lessons: int = setting(48, "held-out tasks per evaluation")
    num_threads: int | None = setting(None, "threads of the trainer; None is one per core")


async def main(config: TinyModelConfig) -> None:
    """Make the model and print progress."""
    output_path = await asyncio.to_thread(new_folder, "output_path", str(config.output_path))
    with tempfile.TemporaryDirectory(prefix="cua_rl_tiny_model_") as scratch:
        start = config.model_path
        if start is None:
            start = Path(scratch) / "grounded"
            await run_stage("scripts.tiny_models.untrained_model", start, config.seed, scratch=Path(scratch))
            arguments = (start, config.seed, config.grounding_steps)
            await run_stage("scripts.tiny_models.grounding", *arguments, scratch=Path(scratch))
        renderer = make_renderer(start)
        random, num_steps = Random(config.seed), config.perfect_steps + config.imperfect_steps
        held_out = await _held_out_datums(config, renderer)
        await imitate(
            start,
            output_path,
            seed=config.seed,
            num_threads=config.num_threads,
            num_steps=num_steps,
            draw_batch=partial(_draw_batch, config, renderer, random),
            # linear decay to a tenth over the last fifth
            learning_rate=lambda step: (
                config.learning_rate * min(1.0, max(0.1, (num_steps - step) / (0.2 * num_steps)))
            ),
            evaluate=partial(_evaluate, held_out),
            is_evaluated=lambda num_done: num_done % config.eval_every == 0 or num_done == config.perfect_steps,
        )
    print(f"saved {config.output_path}")


async def _draw_batch(config: TinyModelConfig, renderer: Renderer, random: Random, step: int) -> list[Datum]:
    is_perfect = step < config.perfect_steps
    mix = Mix(
        listing_share=config.listing_share if is_perfect else 0.0,
        whole_share=config.whole_share,
        error_rate=0.0 if is_perfect else config.error_rate,
    )
    lessons = [await draw_lesson(random, mix) for _ in range(config.batch_size)]
    if is_perfect:
        lessons += [draw_text_lesson(random) for _ in range(config.text_lessons)]
    return [build_supervised_datum(renderer, lesson, name=f"{step}-{i}") for i, lesson in enumerate(lessons)]


async def _held_out_datums(config: TinyModelConfig, renderer: Renderer) -> dict[str, list[Datum]]:
    """Perfect demonstrations of evaluation tasks, by family, on seeds that training never draws."""
    random = Random(f"held-out-{config.seed}")
    datums: dict[str, list[Datum]] = {}
    for family in ("open_app", "toggle_setting"):
        templates = [template for template in EMBEDDED_EVAL if family in template.tags]
        for index in range(config.eval_lessons // 2):
            template, seed = random.choice(templates), NUM_SEEDS + random.randrange(NUM_SEEDS)
            lesson = await demonstrate_task(
                template, seed, random, error_rate=0.0, max_turns=len(template.instance(seed).route)
            )
            datums.setdefault(family, []).append(build_supervised_datum(renderer, lesson, name=f"eval-{index}"))
    return datums


async def _evaluate(held_out: dict[str, list[Datum]], client: TrainingClient) -> str:
    """Per family, how likely the model is to write all the expert's answers, up to the last click, token for token."""
    shares: list[str] = []
    for family, datums in held_out.items():
        logprobs = await client.forward(datums)
        probability = sum(math.exp(sum(row)) for row in logprobs) / len(logprobs)
        shares.append(f"{family}={probability:.3f}")
    return " ".join(shares)


if __name__ == "__main__":
    sys.exit(run_recipe(TinyModelConfig, main))
