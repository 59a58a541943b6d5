"""Measure models on the same held-out tasks: `python -m cua_rl.recipes.evaluate key=value ...`.

Compares base models, checkpoints and endpoints that speak an OpenAI API; all act through the same agent on the same
devices. Writes attempts.jsonl (as attempts end), results.json, results.md and results.png, and records every rollout in
the database, where each model is a run.
"""

import sys
from collections.abc import Sequence

from cua_rl.command_line.recipe import run_recipe
from cua_rl.run.evaluation_config import EVALUATE_PRESETS, EVALUATE_SECTIONS, EvaluateConfig

__all__ = ["EvaluateConfig", "cli_main"]


async def cli_main(config: EvaluateConfig) -> None:
    """Check the configuration, make the attempts that are missing, and write the results."""
    from cua_rl.run.evaluation import run_evaluation  # after the command line is parsed: see recipes/train.py

    await run_evaluation(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(EvaluateConfig, cli_main, argv, EVALUATE_PRESETS, EVALUATE_SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
