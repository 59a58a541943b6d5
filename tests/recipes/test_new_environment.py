"""What `recipes.new_environment` writes and refuses; tests/environments/test_third_party_environment.py uses it."""

import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.recipes.new_environment import main

ROOT = Path(__file__).parents[2]


def test_the_skeleton_is_formatted_and_typed_as_this_project_is(tmp_path: Path) -> None:
    folder = tmp_path / "my_icons"
    assert main(["name=my_icons", f"folder={folder}"]) == 0
    paths = [str(path) for path in sorted(folder.glob("*.py"))]
    settings = ["--config", str(ROOT / "pyproject.toml")]

    for tool in (
        ["ruff", "format", "--check", *settings, *paths],
        ["ruff", "check", "--no-cache", "--ignore=I001", *settings, *paths],  # here, cua_rl is no foreign package
        ["pyrefly", "check", *settings, "--search-path", str(ROOT), "--search-path", str(folder), *paths],
    ):
        done = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    ["simulator", "demo_training", "My_Icons", "2icons", "class", "json", "numpy", "a-b", "cua_rl", "_", "_my", "my_"],
)
def test_a_name_that_is_taken_or_is_no_module_is_refused(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([f"name={name}", f"folder={tmp_path / 'it'}"]) == 2

    assert f"got '{name}'" in capfd.readouterr().err
    assert not (tmp_path / "it").exists()


@pytest.mark.parametrize("folder", ["full", "full/notes.txt", "full/notes.txt/it"])
def test_a_folder_that_is_not_empty_or_cannot_be_made_is_left_alone(
    folder: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")

    assert main(["name=my_icons", f"folder={tmp_path / folder}"]) == 2

    assert "folder: " in capfd.readouterr().err
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["full", "full/notes.txt"]
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
