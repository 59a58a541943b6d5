"""Which tests `make test` chooses of those with the real thing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.groups import LONGEST, PATHS, group_of_file, place_in_order
from tests.not_tested import UNTIL

ROOT = Path(__file__).parents[1]


def functions_of(path: Path) -> list[str]:
    found = ast.parse(path.read_text(encoding="utf-8")).body
    return [one.name for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_has_a_test_of_which_no_other_has_the_beginning(path: str) -> None:
    file, _, test = PATHS[path].partition("::")
    name = test.partition("[")[0]

    # --deselect leaves out every test that begins so
    assert [found for found in functions_of(ROOT / "tests" / "real" / file) if found.startswith(name)] == [name]


def test_the_longest_groups_begin_first_and_are_there() -> None:
    files = sorted((ROOT / "tests" / "real").rglob("test_*.py"))
    groups = {group_of_file(file).removeprefix(f"{ROOT}/") for file in files}

    assert [name for name in LONGEST if name not in groups] == []
    begun = sorted([*files, Path(__file__)], key=place_in_order)
    assert group_of_file(begun[0]) == LONGEST[0]
    assert begun[-1] == Path(__file__)


def test_where_time_may_run_out_other_groups_come_last_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted((ROOT / "tests" / "real").rglob("test_*.py"))
    monkeypatch.setenv(UNTIL, "1")
    first = sorted(files, key=place_in_order)
    monkeypatch.setenv(UNTIL, "2")
    second = sorted(files, key=place_in_order)

    longest = [file for file in first if group_of_file(file).removeprefix(f"{ROOT}/") in LONGEST]
    assert first[: len(longest)] == second[: len(longest)] == longest
    assert set(first[-5:]) != set(second[-5:])


def test_what_is_chosen_is_left_out_of_the_rest() -> None:
    chosen, left_out = (
        subprocess.run(
            [sys.executable, "-m", "tests.groups", *options], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.split()
        for options in ([], ["--deselect"])
    )

    assert chosen == [f"tests/real/{test}" for test in PATHS.values()]
    assert left_out == [f"--deselect={test}" for test in chosen]
