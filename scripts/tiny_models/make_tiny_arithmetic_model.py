"""Make a tiny model that adds, from random weights: `python -m scripts.tiny_models.make_tiny_arithmetic_model`.

It answers questions such as "What is 37 + 5?" with a number, as tinker-cookbook's recipe for arithmetic wants it, but
often with a question mark instead, and wrongly now and then: to stop that is left to reinforcement learning.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import chz

from cua_rl.command_line.fields import check_numbers, setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.run_folder.log_directory import new_folder
from scripts.tiny_models.imitation import run_stage


@chz.chz
class TinyArithmeticModelConfig:
    """How the model is made."""

    output_path: Path = setting(Path("tiny_arithmetic_model"), "folder for the model; must not exist, or be empty")
    seed: int = setting(0, "seed of weights and questions", at_least=0)
    num_steps: int = setting(2000, "steps of imitating right answers", at_least=1)

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)


async def main(config: TinyArithmeticModelConfig) -> None:
    """Make the model and print its last step."""
    folder = await asyncio.to_thread(new_folder, "output_path", str(config.output_path))
    arguments = (folder, config.seed, config.num_steps)
    with tempfile.TemporaryDirectory(prefix="cua_rl_tiny_arithmetic_model_") as scratch:
        await run_stage("scripts.tiny_models.arithmetic", *arguments, scratch=Path(scratch))
    print(f"saved {config.output_path}")


if __name__ == "__main__":
    sys.exit(run_recipe(TinyArithmeticModelConfig, main))
