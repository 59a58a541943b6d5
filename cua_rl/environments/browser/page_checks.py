"""Checks of tasks on web pages: a query of the page, a Python function, or a command that asks the site.

    {"query": "value:#q", "expected": "tea"}
    "verifiers/buy_tea.py"               its function verify(url) or verify(url, answer); "file.py:name" another one
    {"command": "node verify.js {url}"}  with CUA_SITE_URL and CUA_ANSWER in its environment

Functions and commands run in processes and guest accounts of their own, without our environment. A function returns,
and a command prints as JSON on its last line: true, false, a score from 0 to 1, [success, message] or {"success": ...,
"score": ..., "message": ...}. A check that itself fails is tried on a fresh page (`rollout.fresh_check`).
"""

import ast
import json
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cua_rl.environments.browser import check_function
from cua_rl.environments.browser.page import as_page
from cua_rl.environments.browser.served_site import ServedSite, run_guest, split_command
from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.tasks.fields import read_mapping, require_known
from cua_rl.tasks.goal import Goal, check_goal, parse_goal
from cua_rl.types.errors import ConfigError, TaskError
from cua_rl.types.judgement import Validation

DEFAULT_FUNCTION = "verify"
_MAX_ANSWER_CHARACTERS = 30_000  # a variable of the environment holds at most 128 KiB
_EXPECTED = 'true, false, a number from 0 to 1, [true, "message"] or {"success": true, "score": 0.5, "message": "..."}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCheck:
    """A program that gets the address of the site and reports whether the task is done."""

    name: str
    """The check as written in the task."""
    command: str
    folder: Path
    """Where it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result that a program reports."""

    success: bool
    score: float | None = None
    message: str = ""


PageCheck = Goal | ProgramCheck


def parse_check(value: object, what: str, folder: Path, browser: DeviceAbilities) -> PageCheck:
    """Read the check of a task whose files are relative to `folder`; raises `ConfigError`."""
    if isinstance(value, str):
        return _parse_function(value, what, folder)
    given = read_mapping(value, what, '{"query": "value:#q", "expected": "tea"}')
    if "command" not in given.raw:
        return parse_goal(given.raw, what, browser)
    given.require_keys(("command",))
    command = given.text("command") or ""
    require_program(command, what)
    return ProgramCheck(name=command, command=command, folder=folder)


def require_program(command: str, what: str) -> None:
    """Raise `ConfigError` unless the command's first word is a program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"expected {what} as a command, got {command!r} ({error}); correct its quotes") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"expected {what} to begin with a program, got {command!r}; install it, or name it by its absolute path"
        )


def _parse_function(value: str, what: str, folder: Path) -> ProgramCheck:
    file, _, function = value.partition(":")
    function = function or DEFAULT_FUNCTION
    path = folder / file
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(
            f'expected {what} as a Python file below {str(folder)!r}, such as "verifiers/task.py", got {value!r}; '
            'correct it, or write {"command": "..."} or {"query": "...", "expected": "..."}'
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected Python in {str(path)!r} ({what}), got {error}; correct the file") from None
    functions = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    require_known(f"function of {str(path)!r} in {what}", function, functions)
    arguments = functions[function]
    if not 1 <= len([*arguments.posonlyargs, *arguments.args]) <= 2:
        raise ConfigError(
            f"expected {function}(url) or {function}(url, answer) in {str(path)!r}, got {ast.unparse(arguments)!r} "
            "as its arguments; change it"
        )
    command = shlex.join([sys.executable, check_function.__file__, str(path), function])
    return ProgramCheck(name=value, command=command, folder=folder)


async def run_check(check: PageCheck, address: str | None, device: Device, answer: str | None) -> Validation:
    """Validate a task on a page; `address` is that of a site that the run does not serve.

    Raises `TaskError` if the check itself fails, `DeviceError` if the site has ended.
    """
    site = as_page(device).site
    if isinstance(site, ServedSite):
        site.require_running()
    if isinstance(check, Goal):
        return await check_goal(check, device, answer)
    started = time.monotonic()
    url, port, inside = address or "", 0, ()
    if isinstance(site, ServedSite):
        url, port, inside = site.address, site.port, site.servers.network.inside
    # environment variables cannot hold NUL or lone surrogates
    said = (answer or "").replace("\0", "").encode("utf-8", "replace").decode()[:_MAX_ANSWER_CHARACTERS]
    argv = split_command(check.command, port=port, url=url)
    status, printed = await run_guest(argv, check.folder, {"CUA_SITE_URL": url, "CUA_ANSWER": said}, inside)
    if isinstance(site, ServedSite):
        site.require_running()  # otherwise a verdict on a dead site would count
    if status != 0:
        raise TaskError(
            f"expected the check {check.name!r} to end well, it ended with status {status}: {printed[-800:]}"
        )
    verdict = parse_verdict(printed, check.name)
    return Validation(
        query=check.name,
        expected="true",
        actual=verdict.message or json.dumps(verdict.success),
        success=verdict.success,
        score=verdict.score,
        duration_s=time.monotonic() - started,
    )


def parse_verdict(printed: str, name: str) -> Verdict:
    """The verdict on the last line that a check printed; raises `TaskError`."""
    last = printed.strip().rpartition("\n")[2]  # `splitlines` also splits inside JSON strings, which quote pages
    try:
        value = cast("object", json.loads(last))
    except (ValueError, RecursionError):  # also numbers with too many digits, and lists nested too deep
        value = None
    match value:
        case bool():
            return Verdict(success=value)
        case int() | float() if 0 <= value <= 1:
            return Verdict(success=value == 1, score=float(value))
        case list():
            success, message = (*cast("list[object]", value), None, None)[:2]
            fields = {"success": success, "message": message}
        case dict():
            fields = cast("dict[str, object]", value)
        case _:
            fields = {}
    success, score = fields.get("success"), fields.get("score")
    if not isinstance(success, bool) or (score is not None and not _is_share(score)):
        raise TaskError(f"expected {_EXPECTED} from the check {name!r}, got {last[:200]!r}; correct the check")
    return Verdict(
        success=success,
        score=None if score is None else float(cast("float", score)),
        message=str(fields.get("message") or ""),
    )


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
