"""Find regressions before they are deployed: `python -m cua_rl.recipes.suite log_path=suites/phone key=value ...`.

Attempts pinned tasks with a checkpoint and compares it with the last one accepted, task by task. The exit status is 0
without an alarm and 3 with one; 1 and 2 are those of every recipe. `suite.json` in the folder has all comparisons.
"""

import sys
from collections.abc import Sequence

from cua_rl.command_line.recipe import run_recipe
from cua_rl.run.evaluation_config import EVALUATE_SECTIONS
from cua_rl.run.suite import SuiteConfig, SuiteResult, run_suite

EXIT_REGRESSION = 3

SUITE_SECTIONS = {"Suite": ("fall", "power", "false_alarms", "churn", "accept"), **EVALUATE_SECTIONS}
"""What `--help` shows; `--help all` shows every setting."""


async def cli_main(config: SuiteConfig) -> SuiteResult | None:
    """Attempt, compare, record; None if there was nothing to compare with."""
    return await run_suite(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    results: list[SuiteResult | None] = []

    async def run(config: SuiteConfig) -> None:
        results.append(await cli_main(config))

    status = run_recipe(SuiteConfig, run, argv, sections=SUITE_SECTIONS)
    is_regression = any(result is not None and result.is_regression for result in results)
    return status or (EXIT_REGRESSION if is_regression else 0)


if __name__ == "__main__":
    sys.exit(main())
