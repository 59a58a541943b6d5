"""Runs a recipe: reads .env and the command line, handles signals, turns errors into messages and exit statuses."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cua_rl.command_line.parsing import parse_command_line
from cua_rl.command_line.settings import NO_PRESETS, NO_SECTIONS, Sections, ShownPresets
from cua_rl.errors import ConfigError, CuaError

Config = TypeVar("Config")
logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_SIGNAL = 128  # plus the signal's number, as shells have it


def run_recipe(
    config_class: type[Config],
    main: Callable[[Config], Coroutine[Any, Any, object]],
    argv: Sequence[str] | None = None,
    shown_presets: ShownPresets = NO_PRESETS,
    sections: Sections = NO_SECTIONS,
) -> int:
    """Parse the command line, run `main` on the configuration, and return the exit status for `sys.exit`.

    `--help` shows the settings of `sections`, or all, and `shown_presets` after them.

    0 done; 1 a `CuaError`; 2 a `ConfigError`; 130 and 143 after SIGINT and SIGTERM, which cancel `main` so that every
    context it is in unwinds. A second signal ends the process at once. Any other exception is a bug, with traceback.
    """
    load_environment_file(Path(".env"))
    try:
        config = parse_command_line(config_class, sys.argv[1:] if argv is None else argv, shown_presets, sections)
        return asyncio.run(_run_until_signal(main(config)))
    except CuaError as error:
        return report_error(error)
    except BaseExceptionGroup as group:
        error = _first_cua_error(group)
        if error is None:
            raise
        return report_error(error)


def load_environment_file(path: Path) -> None:
    """Load variables from a .env file; variables that are already set keep their values."""
    from dotenv import load_dotenv

    load_dotenv(path, override=False)


async def _run_until_signal(main: Coroutine[Any, Any, object]) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main, name="recipe")
    received: list[int] = []

    def stop(number: int) -> None:
        if received:
            os._exit(EXIT_SIGNAL + number)  # owned processes end with us: their guards see the lifeline close
        received.append(number)
        print("stopping; press Ctrl-C again to end at once", file=sys.stderr, flush=True)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    return EXIT_SIGNAL + received[0] if received else 0


def _first_cua_error(group: BaseExceptionGroup[BaseException]) -> CuaError | None:
    """The first `CuaError` if the group contains no other errors; others are bugs that need their traceback."""
    ours, others = group.split(CuaError)
    if ours is None or others is not None:
        return None
    error = ours.exceptions[0]
    return _first_cua_error(error) if isinstance(error, BaseExceptionGroup) else error


def report_error(error: CuaError) -> int:
    """Print the error for a person: expected, got, what to do; returns the exit status."""
    logger.debug("the recipe failed", exc_info=error)
    what = "configuration error" if isinstance(error, ConfigError) else type(error).__name__
    expected, separator, rest = str(error).partition(", got ")
    came, _, advice = rest.partition("; ")
    parts = [expected, f"got {came}", advice] if separator else [str(error)]
    print(f"{what}: " + "\n    ".join(part for part in parts if part), file=sys.stderr, flush=True)
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
