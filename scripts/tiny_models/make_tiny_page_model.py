"""Make a tiny model for web pages from the one for phones: `python -m scripts.tiny_models.make_tiny_page_model`.

Its lessons come from scripted experts on MiniWoB++ pages: the vision tower first learns to locate elements, then naming
and pointing after a perfect expert, then a short while after one that errs. The last stage leaves a policy that
succeeds sometimes and explores: what reinforcement learning starts from.
"""

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

import chz

from cua_rl.command_line.fields import check_numbers, setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.run_folder.log_directory import new_folder
from cua_rl.supervised.demonstrations import build_supervised_datum
from cua_rl.task_loader import SEED_RANGES
from cua_rl.training.client import TrainingClient
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Datum
from scripts.tiny_models.imitation import imitate, run_stage
from scripts.tiny_models.page_lessons import draw_page_lesson, draw_page_text_lesson
from scripts.tiny_models.page_screens import POINT_STEP, PageScreen, collect_screens, read_screens, write_screens
from scripts.tiny_models.page_tasks import TINY_TASKS

_EVALUATED = 96
"""Held-out screens to measure on."""
_NUM_CLICK_TOKENS = 6
"""The call's beginning, x, a comma, y, the call's end, the end of turn."""


@chz.chz
class TinyPageModelConfig:
    """How the model is made."""

    output_path: Path = setting(Path("tiny_page_model"), "folder for the trained model; must not exist, or be empty")
    model_path: Path = setting(TINY_QWEN3_VL, "the tiny model to start from")
    screens_path: Path | None = setting(None, "file of screens; made if it is not there; None makes them anew")
    browser_scale: float = setting(1.2, "scale factor of screenshots")
    num_screens: int = setting(3000, "number of pages to learn from", at_least=64)
    seed: int = setting(0, "seed of pages and lessons", at_least=0)
    grounding_steps: int = setting(300, "steps of training the vision tower alone", at_least=0)
    perfect_steps: int = setting(300, "steps of the whole model on demonstrations of a perfect expert", at_least=1)
    imperfect_steps: int = setting(60, "steps on demonstrations of an expert that errs", at_least=0)
    error_rate: float = setting(0.7, "probability that this expert clicks a random element", at_least=0.0)
    batch_size: int = setting(16, "screens per step", at_least=1)
    text_lessons: int = setting(16, "additional lessons per step, with the page given as text", at_least=0)
    learning_rate: float = setting(1e-3, "learning rate after warm-up", at_least=0.0)
    listing_share: float = setting(0.3, "share of lessons that only list the elements of the page", at_least=0.0)
    eval_every: int = setting(100, "steps between evaluations", at_least=1)
    num_threads: int | None = setting(None, "threads of the trainer; None is one per core", at_least=1)

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)
        for name, share in (("listing_share", self.listing_share), ("error_rate", self.error_rate)):
            if share > 1:
                raise ValueError(f"{name}: expected a share, 0 to 1, got {share!r}; lower it")
        if not 0 < self.browser_scale <= 4:
            raise ValueError(
                f"browser_scale: expected a number above 0 and at most 4, got {self.browser_scale!r}; change it"
            )


async def main(config: TinyPageModelConfig) -> None:
    """Make the model and print progress."""
    started = time.monotonic()
    output_path = await asyncio.to_thread(new_folder, "output_path", str(config.output_path))
    with tempfile.TemporaryDirectory(prefix="cua_rl_tiny_page_model_") as folder:
        scratch = Path(folder)
        screens_path = await _find_screens(config, scratch)
        screens = await asyncio.to_thread(read_screens, screens_path)
        if len(screens) < 64 + _EVALUATED:
            raise ConfigError(
                f"screens_path: expected at least {64 + _EVALUATED} screens, got {len(screens)}; leave it out"
            )
        print(f"{len(screens)} screens {time.monotonic() - started:.0f}s", flush=True)
        start = scratch / "grounded"
        await run_stage(
            "scripts.tiny_models.extended_model", config.model_path, start, config.seed, "pages", scratch=scratch
        )
        if config.grounding_steps:
            arguments = (start, config.seed, config.grounding_steps, screens_path)
            await run_stage("scripts.tiny_models.grounding", *arguments, scratch=scratch)
        renderer = make_renderer(start)
        seen, held_out = screens[:-_EVALUATED], screens[-_EVALUATED:]  # the last screens are never trained on
        await imitate(
            start,
            output_path,
            seed=config.seed,
            num_threads=config.num_threads,
            num_steps=config.perfect_steps + config.imperfect_steps,
            draw_batch=partial(_draw_batch, config, renderer, Random(config.seed), seen),
            learning_rate=lambda _: config.learning_rate,
            evaluate=partial(_evaluate, renderer, held_out),
            is_evaluated=lambda num_done: num_done % config.eval_every == 0 or num_done == config.perfect_steps,
        )
    print(f"saved {config.output_path} {time.monotonic() - started:.0f}s")


async def _find_screens(config: TinyPageModelConfig, scratch: Path) -> Path:
    path = config.screens_path or scratch / "screens.jsonl"
    if not await asyncio.to_thread(path.is_file):
        num_screens = config.num_screens + _EVALUATED
        started = time.monotonic()

        def report(number: int) -> None:
            if number % 500 == 0:
                print(f"screen={number}/{num_screens} {time.monotonic() - started:.0f}s", flush=True)

        screens = await collect_screens(
            TINY_TASKS,
            SEED_RANGES["train"],
            num_screens,
            scale=config.browser_scale,
            seed=config.seed,
            on_screen=report,
        )
        await asyncio.to_thread(write_screens, path, screens)
    return path


async def _draw_batch(
    config: TinyPageModelConfig, renderer: Renderer, random: Random, screens: Sequence[PageScreen], step: int
) -> list[Datum]:
    if step < config.perfect_steps:
        draw = partial(draw_page_lesson, listing_share=config.listing_share, point_step=POINT_STEP)
        asked = [(screen.instruction, screen.boxes[screen.target].label) for screen in random.sample(screens, 64)]
        lessons = [draw_page_text_lesson(asked, random) for _ in range(config.text_lessons)]
    else:
        draw = partial(draw_page_lesson, listing_share=0.0, error_rate=config.error_rate, point_step=POINT_STEP)
        lessons = []
    lessons += [draw(random.choice(screens), random) for _ in range(config.batch_size)]
    return [build_supervised_datum(renderer, lesson, name=f"{step}-{i}") for i, lesson in enumerate(lessons)]


async def _evaluate(renderer: Renderer, screens: Sequence[PageScreen], client: TrainingClient) -> str:
    """How likely the model is to write what the expert writes, token for token: all of it, and its scan alone."""
    draw = partial(draw_page_lesson, listing_share=0.0, point_step=POINT_STEP)
    datums = [build_supervised_datum(renderer, draw(screen, Random(0)), name="held-out") for screen in screens]
    logprobs = await client.forward(datums)
    whole = [math.exp(sum(row)) for row in logprobs]
    answers = [
        [logprob for logprob, is_trained in zip(row, datum.loss_mask, strict=True) if is_trained]
        for datum, row in zip(datums, logprobs, strict=True)
    ]
    scans = [math.exp(sum(answer[:-_NUM_CLICK_TOKENS])) for answer in answers]
    return f"right={sum(whole) / len(whole):.3f} scan={sum(scans) / len(scans):.3f}"


if __name__ == "__main__":
    sys.exit(run_recipe(TinyPageModelConfig, main))
