"""What the package imports: no heavy libraries at a start, and nothing that runs what others have written."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

HEAVY = ("openai", "torch", "vllm", "peft", "transformers", "tensorboard", "matplotlib", "wandb")
OF_DEVICES = ("httpx", "PIL", "rich", "playwright")
"""What only a run needs, and takes as long to import as all settings: help, mistakes and dry runs answer without."""


@pytest.mark.parametrize(("module", "heavy"), [("run.training", HEAVY), ("recipes.train", (*HEAVY, *OF_DEVICES))])
def test_a_training_run_imports_without_heavy_libraries(module: str, heavy: tuple[str, ...]) -> None:
    program = f"import sys, cua_rl.{module}; print(*(name for name in sys.argv[1:] if name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program, *heavy], capture_output=True, text=True, check=True)

    assert loaded.stdout.split() == []


@pytest.mark.parametrize("suffix", ["agent", "rl.sync_loop", "rollout.run", "sampling.client", "training.client"])
def test_each_part_of_the_controller_imports_alone(suffix: str) -> None:
    """A module that works only after another one was imported would fail here."""
    subprocess.run([sys.executable, "-c", f"import cua_rl.{suffix}"], check=True, cwd=Path.cwd())


RUNS_WHAT_IT_READS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "copyreg"}
OBJECT_COLLECTIVES = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
OWN_CHILDREN = {
    "cua_rl/planning/report.py": "a pool of processes that it starts itself, which read nothing from outside",
    "cua_rl/exchange/parquet.py": "starts a reader, whose answers come as bytes",
    "cua_rl/vllm_cpu_server.py": "lets vLLM fork its engine",
}
"""Who may start processes through `multiprocessing`, which pickles arguments for the child."""


def find_readers_of_code(path: Path) -> set[str]:
    """What in a module could run code that somebody sent."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module.partition(".")[0])
            case ast.Attribute(attr=name) if name in OBJECT_COLLECTIVES:
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
                found |= {"torch.load"} if given.get("weights_only") != "True" else set()
            case ast.Call(func=ast.Attribute(attr="recv"), args=[], keywords=[]):
                found.add("recv()")  # of multiprocessing: a socket's takes a number of bytes
            case _:
                pass
    starts_children = "multiprocessing" in found and path.as_posix() not in OWN_CHILDREN
    return found & {*RUNS_WHAT_IT_READS, *OBJECT_COLLECTIVES, "torch.load", "recv()"} | (
        {"multiprocessing"} if starts_children else set()
    )


def test_no_module_reads_what_could_run_code() -> None:
    found = {str(path): find_readers_of_code(path) for path in Path("cua_rl").rglob("*.py")}

    assert {path: readers for path, readers in found.items() if readers} == {}


def test_readers_of_code_are_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import os, pickle\nfrom multiprocessing.connection import Client\nfrom torch import distributed\n"
        "distributed.all_gather_object([], 1)\ntorch.load('a', weights_only=False)\nClient('a').recv()\n"
    )

    assert find_readers_of_code(path) == {"pickle", "multiprocessing", "all_gather_object", "torch.load", "recv()"}


def find_imports(folder: Path) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports anywhere: in functions and for type checkers too."""
    paths = {".".join(path.relative_to(folder.parent).with_suffix("").parts): path for path in folder.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    imports: dict[str, set[str]] = {}
    for module, path in paths.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    found |= {alias.name for alias in names}
                case ast.ImportFrom(module=str(origin), names=names):
                    inner = {f"{origin}.{alias.name}" for alias in names}
                    found |= inner & paths.keys() or {origin}
                case _:
                    pass
        imports[module] = found & paths.keys() - {module}
    return imports


def find_circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, and the last is the first; none if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = find_imports(Path("cua_rl"))

    assert "cua_rl.types.rollout" in imports["cua_rl.rl.stages"]
    assert find_circle(imports) == []


def test_a_circle_is_found_even_if_one_of_its_imports_is_in_a_function(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "one.py").write_text("from package import two\n")
    (package / "two.py").write_text("def run():\n    from package.three import name\n")
    (package / "three.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import package.one\n")
    (package / "four.py").write_text("import package.one\n")

    circle = find_circle(find_imports(package))

    assert set(circle) == {"package.one", "package.two", "package.three"}


ENVIRONMENTS = Path("cua_rl/environments")


def find_neighbours(root: Path, shared: str = "android") -> set[tuple[str, str]]:
    """Folders of environments, each with another one that it imports from; all may use the `shared` one."""
    return {
        (path.relative_to(root).parts[0], name.split(".")[2])
        for path in root.glob("*/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
        for name in [f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name]
        if name.startswith("cua_rl.environments.")
        and (root / name.split(".")[2]).is_dir()
        and name.split(".")[2] not in (shared, path.relative_to(root).parts[0])
    }


def test_environments_know_nothing_of_one_another() -> None:
    assert find_neighbours(ENVIRONMENTS) == set()


def test_an_environment_that_imports_another_one_is_found(tmp_path: Path) -> None:
    for name in ("boards", "desktop", "android"):
        (tmp_path / name / "screens").mkdir(parents=True)
    (tmp_path / "boards/screens/a.py").write_text(
        "import cua_rl.environments.desktop.device\n"
        "from cua_rl.environments import contract\n"
        "from cua_rl.environments.android import folders\n"
        "from cua_rl.environments.boards.screens import b\n"
    )

    assert find_neighbours(tmp_path) == {("boards", "desktop")}


def test_the_folder_of_every_environment_is_a_package() -> None:
    """Import contracts do not see others."""
    assert [path for path in ENVIRONMENTS.glob("*/environment.py") if not (path.parent / "__init__.py").exists()] == []
