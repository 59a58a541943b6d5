"""Everything on our pages that a reader may copy: commands, Python, files and options, each with its place.

Read are fenced blocks and code spans of Markdown pages, and the docstrings of modules. Optional parts of a usage line
stand in square brackets there, and are given.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
Kind = Literal["command", "python", "file", "json", "options", "unnamed"]

PROGRAMS = {
    *("python", "make", "bash", "sh", "pip", "npm", "node", "export", "cd", "docker", "vllm", "pre-commit", "ruff"),
}
SHELLS = {"bash", "sh"}
DATA = {"json", "jsonl", "yaml"}
FIGURES = {"", "text", "mermaid", "sql"}
"""Languages of blocks that nobody runs from a shell; SQL has a test of its own."""

_FENCE = re.compile(
    r"^```(?P<language>\w*)(?: file=(?P<file>\S+))?\n(?P<text>.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE
)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S*")
_OPTION = re.compile(r"[a-z_][a-z0-9_.]*=.+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One thing to copy. `text` is a command on one line, the body of a block, or options as on a command line."""

    page: str
    line: int
    kind: Kind
    text: str
    file: str | None = None
    """The name under which the page says to save it."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        """A command as the shell splits it."""
        return shlex.split(self.text, comments=True)


def read_examples(path: Path) -> list[Example]:
    """All examples of a Markdown page or of a module's docstring, from top to bottom."""
    page = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return list(read_usage(page, ast.get_docstring(ast.parse(text), clean=False) or ""))
    found = [*_of_blocks(page, text), *_of_spans(page, text)]
    return sorted(found, key=lambda example: example.line)


def is_command(text: str) -> bool:
    """Whether it begins with one of our programs, a script of ours, or a tool in .venv."""
    words = _split(text)
    while words and ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    if not words:
        return False
    first = words[0]
    is_ours = first.startswith((".venv/", "scripts/", "../scripts/", "./")) and "*" not in first
    return is_ours or (first in PROGRAMS and len(words) > 1)


def is_options(text: str) -> bool:
    """Whether it is nothing but settings: `loss=ppo clip_high=1`."""
    words = _split(text)
    return bool(words) and all(_OPTION.fullmatch(word) for word in words)


def _of_blocks(page: str, text: str) -> Iterator[Example]:
    for block in _FENCE.finditer(text):
        line = text.count("\n", 0, block.start()) + 2
        language, body = block["language"], block["text"]
        if block["file"]:
            yield Example(page=page, line=line, kind="file", text=body, file=block["file"])
        elif language in SHELLS:
            yield from _of_shell(page, line, body)
        elif language == "python":
            yield Example(page=page, line=line, kind="python", text=body)
        elif language in DATA:
            yield Example(page=page, line=line, kind="json", text=body, file=language)
        elif language not in FIGURES or any(is_command(entry) for entry in body.splitlines()):
            yield Example(page=page, line=line, kind="unnamed", text=body)


def _of_shell(page: str, line: int, body: str) -> Iterator[Example]:
    """The commands of a block: one goes on after a backslash, and while a quotation mark is open."""
    held, began = "", line
    for number, entry in enumerate(body.splitlines(), line):
        if not held:
            began = number
        held = held.removesuffix("\\") + entry if held.endswith("\\") else f"{held}\n{entry}" if held else entry
        if held.endswith("\\") or not _is_closed(held):
            continue
        if shlex.split(held, comments=True):
            yield Example(page=page, line=began, kind="command", text=held)
        held = ""
    if held:
        yield Example(page=page, line=began, kind="unnamed", text=held)


def _of_spans(page: str, text: str) -> Iterator[Example]:
    outside = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for span in _SPAN.finditer(outside):
        line = outside.count("\n", 0, span.start()) + 1
        code = span[1].replace("\\|", "|")
        if is_command(code):
            needed = "".join(f"{name}=... " for name in _needed_variables(outside.splitlines()[line - 1]))
            yield Example(page=page, line=line, kind="command", text=needed + code)
        elif is_options(code):
            yield Example(page=page, line=line, kind="options", text=code)


def _needed_variables(row: str) -> list[str]:
    """Environment variables that a row of a table lists as what its command needs."""
    return re.findall(r"`([A-Z][A-Z_]*_KEY)`", row) if row.startswith("|") else []


def read_usage(page: str, text: str) -> Iterator[Example]:
    """The commands of a docstring or of what a program prints: lines of their own, or code spans."""
    for number, entry in enumerate(text.splitlines(), 1):
        spans = [span[1] for span in _SPAN.finditer(entry)]
        for usage in spans or [entry.strip()]:
            command = re.sub(r"[\[\]]|(?<=[ \]])\.\.\.", "", usage.split("     #")[0]).strip()
            if is_command(command):
                yield Example(page=page, line=number, kind="command", text=command)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return []


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True
