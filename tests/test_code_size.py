"""The counting rules of `scripts/code_size.py` on small packages."""

from pathlib import Path

from scripts.code_size import (
    Module,
    count_code_lines,
    count_settings,
    find_excesses,
    find_single_use_helpers,
    find_small_modules,
    read_module,
)


def write(root: Path, **texts: str) -> dict[str, Module]:
    """The modules of a package `pack`, one for every text."""
    folder = root / "pack"
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return {name: read_module(folder / f"{name}.py", root) for name in texts}


def test_docstrings_and_lines_inside_of_strings_count_as_code_but_comments_and_blank_lines_do_not():
    text = '"""Two\n\nparagraphs."""\n\n# why\nx = (\n    1,  # one\n    # two\n)\n'

    # 3 of the docstring with its blank line; "x = (", "1,", ")"
    assert count_code_lines(text) == 6


def test_a_private_function_that_its_module_names_once_is_a_single_use_helper(tmp_path: Path):
    text = """
def _once() -> int:
    return 1

def _twice() -> int:
    return 2

def public() -> int:
    return _once() + _twice() + _twice()

class Thing:
    def __init__(self) -> None:
        self._method()

    def _method(self) -> None: ...

    def _unused(self) -> None: ...
"""
    modules = write(tmp_path, thing=text)

    found = find_single_use_helpers([*modules.values()])

    assert [function.name for _, function in found] == ["_once", "_method"]


def test_a_helper_that_a_test_imports_has_a_second_use(tmp_path: Path):
    modules = write(tmp_path, thing="def _once(): ...\n_once()\n")

    assert not find_single_use_helpers([*modules.values()], {"pack.thing._once"})


def test_small_modules_count_if_one_other_module_imports_them_in_whatever_way(tmp_path: Path):
    modules = write(
        tmp_path,
        by_name="x = 1\n",
        by_module="x = 1\n",
        by_two="x = 1\n",
        by_none="import pack.by_two\n",
        long="x = 1\n" * 60,
        user="from pack import by_module, by_two\nfrom pack.by_name import x\nimport pack.long\n",
    )

    found = find_small_modules([*modules.values()])

    assert [module.name for module, _ in found] == ["pack.by_name", "pack.by_module"]
    assert {importer.name for _, importer in found} == {"pack.user"}


def test_a_function_is_annotated_if_all_arguments_but_self_and_the_result_are(tmp_path: Path):
    text = """
class Thing:
    def good(self, x: int, *more: int, key: int = 1) -> int: ...
    def no_result(self, x: int): ...
    def no_argument(self, x) -> int: ...
    def no_rest(self, **rest) -> int: ...
"""
    (module,) = write(tmp_path, thing=text).values()

    assert [function.name for function in module.functions if function.is_annotated] == ["good"]


def test_settings_are_the_lines_of_the_help_that_begin_with_a_name_and_have_a_description():
    text = """Settings, as key=value

  agent=gbox
      agent=external: command
  loss.name=ppo
      the loss

Presets:
  agent=external
"""

    assert count_settings(text) == 2


def test_only_a_figure_above_its_limit_is_an_excess():
    limits = {"lines": 10, "helpers %": 15}

    assert find_excesses({"lines": 10, "helpers %": 15.2}, limits) == ["helpers %: expected at most 15, got 15.2"]
