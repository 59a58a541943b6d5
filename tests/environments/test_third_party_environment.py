"""Another package adds an environment by an entry point: the one that `recipes.new_environment` writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from cua_rl.recipes.new_environment import main as new_environment

ROOT = Path(__file__).parents[2]


def install(folder: Path, entry_point: str = "my_icons:ENVIRONMENT") -> dict[str, str]:
    """Write the package to `folder/my_icons`, with this entry point, and return variables that find it there.

    They lead to what `pip install -e` would put into the environment of the tests, which is left as it is.
    """
    package, site = folder / "my_icons", folder / "site"
    assert new_environment(["name=my_icons", f"folder={package}"]) == 0
    project = package / "pyproject.toml"
    project.write_text(project.read_text().replace("my_icons:ENVIRONMENT", entry_point))
    site.mkdir()
    build = f"from setuptools.build_meta import build_editable; build_editable({str(site)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=package, capture_output=True, check=True)
    (wheel,) = site.glob("*.whl")
    ZipFile(wheel).extractall(site)
    (paths,) = site.glob("*.pth")
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(site), *paths.read_text().split()))}


def run(environ: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)


def test_it_passes_its_own_test_and_can_be_trained_on_with_the_embedded_model(tmp_path: Path) -> None:
    environ = install(tmp_path)

    tested = run(environ, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_icons")
    planned = run(environ, tmp_path, "-m", "cua_rl.recipes.train", "tasks.source_type=my_icons", "dry_run=true")

    assert "2 passed" in tested.stdout, tested.stdout + tested.stderr
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["changed_from_defaults"]["eval_tasks"] == {"source_type": "my_icons"}


@pytest.mark.parametrize(
    ("entry_point", "complaint"),
    [
        ("my_icons:IconScreens", "expected an Environment at 'my_icons:IconScreens'"),
        ("my_icon:ENVIRONMENT", "No module named 'my_icon'"),
        ("my_icons:ENVIRONMENTS", "has no attribute 'ENVIRONMENTS'"),
        ("cua_rl.environments.table:DESKTOP", "expected names that no other environment has, got ['desktop']"),
    ],
)
def test_a_package_whose_entry_point_leads_nowhere_is_named(tmp_path: Path, entry_point: str, complaint: str) -> None:
    done = run(install(tmp_path, entry_point), tmp_path, "-c", "import cua_rl.environments.table")

    assert complaint in done.stderr
    assert "ConfigError" in done.stderr
    assert "an entry point 'cua_rl.environments' (correct it, or uninstall its package)" in done.stderr
