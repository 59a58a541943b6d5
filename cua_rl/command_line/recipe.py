"""Runs a recipe: reads .env and the command line, handles signals, turns errors into messages and exit statuses."""

import asyncio
import logging
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from cua_rl.command_line.parsing import parse_command_line
from cua_rl.command_line.plain_config import plain_config
from cua_rl.command_line.settings import NO_PRESETS, NO_SECTIONS, Sections, ShownPresets
from cua_rl.host.environment_file import load_environment_file
from cua_rl.host.masking import MASK, MaskingFormatter, is_secret_name, mask_known, mask_secrets, secrets_in
from cua_rl.host.system import hide_arguments, refuse_inspection
from cua_rl.types.errors import ConfigError, CuaError, writing
from cua_rl.types.json_values import sequence

Config = TypeVar("Config")
logger = logging.getLogger(__name__)

_SHORTEST_HIDDEN = 4  # shorter ones would hide parts of innocent words

EXIT_FAILED = 1
EXIT_CONFIG = 2
_ANSWER = re.compile(r'"(?:expected|answer)"\s*:\s*(?:"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^,}\]]+)')
"""What a task given on the command line expects: programs of the policy can read the command lines of all users."""
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
    refuse_inspection()
    sys.excepthook = report_bug
    if logging.lastResort is not None:  # warnings before a run has its log
        logging.lastResort.setFormatter(MaskingFormatter())
    arguments = list(sys.argv[1:] if argv is None else argv)
    hide_secrets(arguments)
    if answers := [found for argument in arguments for found in _ANSWER.findall(argument)]:
        hide_arguments(answers)
    with quiet_if_nobody_reads():
        return _run(config_class, main, arguments, shown_presets, sections)


def _run(
    config_class: type[Config],
    main: Callable[[Config], Coroutine[Any, Any, object]],
    arguments: Sequence[str],
    shown_presets: ShownPresets,
    sections: Sections,
) -> int:
    try:
        load_environment_file()
        config = parse_command_line(config_class, arguments, shown_presets, sections)
        plain_config(config)  # from here on, logs and errors know its secrets
        with writing(Path()):  # where a component does not name its own folder
            return asyncio.run(_run_until_signal(main(config)))
    except CuaError as error:
        return report_error(error)
    except BaseExceptionGroup as group:
        error = _first_cua_error(group)
        if error is None:
            raise
        return report_error(error)


def hide_secrets(argv: Sequence[str]) -> None:
    """Warn of secrets on a command line, which every user of the machine can read, and hide them from now on."""
    secrets = [secret for secret in secrets_in(argv) if len(secret) >= _SHORTEST_HIDDEN]
    if not secrets:
        return
    hide_arguments(secrets)
    masked = list(map(str, sequence(mask_secrets({"argv": list(argv)})["argv"])))
    shown: list[str] = []
    files: list[str] = []
    for place, argument in enumerate(masked):
        if MASK not in argument:
            continue
        is_value = argument == MASK and place > 0  # of `--name value`
        shown += [masked[place - 1], argument] if is_value else [argument]
        name = (masked[place - 1] if is_value else argument.partition("=")[0]).removeprefix("--").replace("-", "_")
        files += [f"{name}_file=PATH"] if is_secret_name(name) else []
    private = f", or into a private file: {' '.join(files)}" if files else ""
    print(
        f"warning: every user of this machine could read a secret on this command line ({' '.join(shown)}), and the "
        f"shell may keep it; put it into the environment or .env (env.example){private}",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def quiet_if_nobody_reads() -> Generator[None]:
    """Flush what was printed; once its reader is gone (`| head`), exit as other programs do, without a traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in output.poll(0)):
            raise  # another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        raise SystemExit(EXIT_SIGNAL + signal.SIGPIPE) from None


def report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an exception that nothing has caught, without secrets."""
    print(mask_known("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


async def _run_until_signal(main: Coroutine[Any, Any, object]) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main, name="recipe")
    received: list[int] = []

    def stop(number: int) -> None:
        if received:
            os._exit(EXIT_SIGNAL + number)  # owned processes end with us: their guards see the lifeline close
        received.append(number)
        task.cancel()
        try:
            print("stopping; press Ctrl-C again to end at once", file=sys.stderr, flush=True)
        except OSError:  # Ctrl-C also ends a program that our output is piped to
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # for what is said while the recipe unwinds

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
    expected, separator, rest = mask_known(str(error)).partition(", got ")
    came, _, advice = rest.partition("; ")
    parts = [expected, f"got {came}", advice] if separator else [expected]
    print(f"{what}: " + "\n    ".join(part for part in parts if part), file=sys.stderr, flush=True)
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
