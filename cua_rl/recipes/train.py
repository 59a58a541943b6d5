"""Train a vision computer-use agent: `python -m cua_rl.recipes.train key=value ...`.

With no model named, this is the embedded demo: a tiny Qwen3-VL on a simulated phone, its own database, and vLLM on
whatever the machine has.
"""

import sys
from collections.abc import Sequence

from cua_rl.command_line.recipe import run_recipe
from cua_rl.run.training_config import TRAIN_PRESETS, TRAIN_SECTIONS, CLIConfig

__all__ = ["CLIConfig", "cli_main"]


async def cli_main(config: CLIConfig) -> None:
    """Check the configuration, then train; returns when the run is complete and all its processes have ended."""
    # database, vLLM client and agents take a second to import: a command line that is refused does not wait for them
    from cua_rl.run.training import run_training

    await run_training(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line; the embedded demo if no model is named."""
    return run_recipe(CLIConfig, cli_main, argv, TRAIN_PRESETS, TRAIN_SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
