"""Run rollouts for a training run: `python -m cua_rl.recipes.rollout_worker controller=http://trainer:8300`.

The environment holds the run's ROLLOUT_WORKER_TOKEN, and DATABASE_URL where the database has another address from here.
A run with rollout_workers=N starts its own.
"""

import logging
import sys
from collections.abc import Sequence

from cua_rl.command_line.recipe import run_recipe
from cua_rl.host.masking import MaskingFormatter
from cua_rl.workers.worker_config import WorkerConfig


async def cli_main(config: WorkerConfig) -> None:
    """Work until the run is over."""
    from cua_rl.run.reporting import LOG_FORMAT  # after the command line is parsed: see recipes/train.py
    from cua_rl.workers.workplace import run_worker

    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter(LOG_FORMAT))
    ours = logging.getLogger("cua_rl")
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    await run_worker(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(WorkerConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
