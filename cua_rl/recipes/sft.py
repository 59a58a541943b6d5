"""Supervised fine-tuning, the cold start before reinforcement learning: `python -m cua_rl.recipes.sft key=value ...`.

It imitates scripted experts, the recorded successes of an earlier run, or conversations from a file; only what the
assistant says is trained on. With no arguments, the tiny model imitates the experts of the phone simulator.
"""

import sys
from collections.abc import Sequence

from cua_rl.command_line.recipe import run_recipe
from cua_rl.run.sft_config import SFT_PRESETS, SFT_SECTIONS, SftConfig

__all__ = ["SftConfig", "cli_main"]


async def cli_main(config: SftConfig) -> None:
    """Check configuration and data, then train; returns when the run is complete and all its processes have ended."""
    from cua_rl.run.sft import run_sft  # after the command line is parsed: see recipes/train.py

    await run_sft(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(SftConfig, cli_main, argv, SFT_PRESETS, SFT_SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
