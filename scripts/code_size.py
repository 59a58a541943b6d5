"""Measure the size and shape of the code and fail if a limit is passed: `python -m scripts.code_size [--list]`.

A line of code holds a token that is not a comment; docstrings count. A helper is a private function or method; it is
used once if its module names it once and no other module imports it. Importers are modules of the package.
"""

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "cua_rl"
CORE = (
    *("types", "rl", "rollout", "agent"),
    *("sampling", "training", "renderers", "rewards", "evaluation"),
)
SMALL_MODULE_LINES = 60

LIMITS: Mapping[str, float] = {
    "core code lines": 17_597,
    "all code lines": 69_990,
    "single-use helpers %": 15,
    "small modules with one importer": 15,
    "settings in train --help": 35,
}
"""The code may shrink but not grow: lower a limit when a change gets below it."""

_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function or method."""

    name: str
    line: int
    num_lines: int
    is_annotated: bool
    """Every argument but `self` and `cls`, and the result."""
    num_uses: int
    """How often its module names it."""

    @property
    def is_single_use(self) -> bool:
        """Whether it is private and named in one place; `__init__` and its like are called by Python."""
        return self.name.startswith("_") and not self.name.endswith("__") and self.num_uses == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A Python file and what the figures need of it."""

    name: str
    path: Path
    num_lines: int
    num_code_lines: int
    functions: tuple[Function, ...]
    imports: frozenset[str]
    """Dotted names; `from a import b` gives `a` and `a.b`, because `b` may be a module."""


def read_module(path: Path, root: Path) -> Module:
    """Parse a file; its module name comes from its place below `root`."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    names = path.relative_to(root).with_suffix("").parts
    uses = Counter(_used_names(tree))
    return Module(
        name=".".join(names[:-1] if names[-1] == "__init__" else names),
        path=path.relative_to(root),
        num_lines=text.count("\n"),
        num_code_lines=count_code_lines(text),
        functions=tuple(
            Function(
                name=node.name,
                line=node.lineno,
                num_lines=(node.end_lineno or node.lineno) - node.lineno + 1,
                is_annotated=_is_annotated(node),
                num_uses=uses[node.name],
            )
            for node in ast.walk(tree)
            if isinstance(node, _Function)
        ),
        imports=frozenset(_imported_names(tree)),
    )


def count_code_lines(text: str) -> int:
    """Lines with a token that is not a comment; every line of a string that spans several counts."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT and token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def _used_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case _:
                pass


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case _:
                pass


def _is_annotated(node: _Function) -> bool:
    given = node.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    arguments += [one for one in (given.vararg, given.kwarg) if one is not None]
    return node.returns is not None and all(
        argument.annotation is not None or argument.arg in ("self", "cls") for argument in arguments
    )


def find_single_use_helpers(
    modules: Sequence[Module], imports_elsewhere: Collection[str] = ()
) -> list[tuple[Module, Function]]:
    """Helpers of `modules` that one place uses; what is imported elsewhere, such as by tests, has another use."""
    imported = set(imports_elsewhere).union(*(module.imports for module in modules))
    return [
        (module, function)
        for module in modules
        for function in module.functions
        if function.is_single_use and f"{module.name}.{function.name}" not in imported
    ]


def find_small_modules(modules: Sequence[Module]) -> list[tuple[Module, Module]]:
    """Small modules with a single importer, each with its importer."""
    found: list[tuple[Module, Module]] = []
    for module in modules:
        importers = [other for other in modules if module.name in other.imports and other is not module]
        is_small = module.num_lines < SMALL_MODULE_LINES and module.path.name != "__init__.py"
        if is_small and len(importers) == 1:
            found.append((module, importers[0]))
    return found


def count_settings(help_text: str) -> int:
    """Settings are the lines `  name=default` with a description below; presets have none."""
    return len(re.findall(r"^  [a-z][\w.]*=.*\n {6}\S", help_text, re.MULTILINE))


def measure(modules: Sequence[Module], imports_elsewhere: Collection[str], help_text: str) -> dict[str, float]:
    """Every figure by its name."""
    functions = [function for module in modules for function in module.functions]
    lengths = sorted(function.num_lines for function in functions)
    core = tuple(f"{PACKAGE}.{area}." for area in CORE)
    return {
        "core code lines": sum(module.num_code_lines for module in modules if f"{module.name}.".startswith(core)),
        "all code lines": sum(module.num_code_lines for module in modules),
        "files": len(modules),
        "file lines, median": statistics.median(module.num_lines for module in modules),
        "functions": len(functions),
        "function lines, median": statistics.median(lengths),
        "function lines, p90": lengths[int(0.9 * (len(lengths) - 1))],
        "annotated functions %": 100 * sum(function.is_annotated for function in functions) / len(functions),
        "single-use helpers %": 100 * len(find_single_use_helpers(modules, imports_elsewhere)) / len(functions),
        "small modules with one importer": len(find_small_modules(modules)),
        "settings in train --help": count_settings(help_text),
    }


def find_excesses(figures: Mapping[str, float], limits: Mapping[str, float] = LIMITS) -> list[str]:
    """What to say of every figure above its limit."""
    return [
        f"{name}: expected at most {limit:g}, got {round(figures[name], 1):g}"
        for name, limit in limits.items()
        if figures[name] > limit
    ]


def _print_lists(modules: Sequence[Module], imports_elsewhere: Collection[str]) -> None:
    print(f"modules under {SMALL_MODULE_LINES} lines with one importer:")
    for module, importer in find_small_modules(modules):
        print(f"  {module.path} ({module.num_lines} lines) <- {importer.path}")
    print("helpers used once:")
    for module, function in find_single_use_helpers(modules, imports_elsewhere):
        print(f"  {module.path}:{function.line} {function.name} ({function.num_lines} lines)")


def main(arguments: Sequence[str]) -> int:
    """Print the figures; the exit status is 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description="Measure the code and fail if a limit is passed.")
    parser.add_argument("--list", action="store_true", help="also list small modules and helpers used once")
    options = parser.parse_args(arguments)
    # starts first, to run beside the counting
    command = [sys.executable, "-m", "cua_rl.recipes.train", "--help"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as asked:
        modules = [read_module(path, ROOT) for path in sorted((ROOT / PACKAGE).rglob("*.py"))]
        imports_elsewhere = {
            name
            for folder in ("tests", "scripts", "benchmarks")
            for path in (ROOT / folder).rglob("*.py")
            for name in _imported_names(ast.parse(path.read_text(encoding="utf-8")))
        }
        help_text, _ = asked.communicate()
    if asked.returncode:
        raise SystemExit(f"expected {' '.join(command)} to print the settings, got exit status {asked.returncode}")
    figures = measure(modules, imports_elsewhere, help_text)
    for name, figure in figures.items():
        print(f"{name:34}{round(figure, 1):10,g}" + (f"  (at most {LIMITS[name]:,g})" if name in LIMITS else ""))
    if options.list:
        _print_lists(modules, imports_elsewhere)
    excesses = find_excesses(figures)
    for excess in excesses:
        print(f"{excess}; merge or delete code, or say in the commit why the limit has to rise", file=sys.stderr)
    return 1 if excesses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
