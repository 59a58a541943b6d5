"""Another package adds an environment by an entry point: the example, as its package would be installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "environments"
SOLVE = """
import asyncio
from cua_rl.types.actions import Click
from cua_rl.environments.pool import open_pool
from cua_rl.run.devices import prepare_devices
from cua_rl.run.training_config import CLIConfig
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.readiness import validate
from pathlib import Path

async def solve(seed):
    config = CLIConfig(model_name="m", tasks={"source_type": "red_half"})
    plan = prepare_devices(config, Path("run"))
    tasks = load_tasks(config.tasks, seed=0, split="train", device=plan.backend.abilities)
    task = tasks.templates[0].make_task(seed)
    async with open_pool(plan.backend, max_devices=1) as pool, pool.lease(task.device_request()) as device:
        seen = await device.observe()
        await device.execute(Click(x=10, y=10))
        verdict = await validate(task, device, None)
    print(config.eval_tasks == config.tasks, plan.smallest_screen.width_px == seen.width_px, verdict.success)

asyncio.run(solve(0))
asyncio.run(solve(1))
"""


def install(folder: Path, entry_point: str) -> dict[str, str]:
    """Make the files that pip leaves of a package, and return an environment that finds them."""
    info = folder / "red_half-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: red-half\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[cua_rl.environments]\nred_half = {entry_point}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, folder, EXAMPLE)))}


def run(code: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)


def test_tasks_of_another_package_are_loaded_run_on_its_devices_and_validated(tmp_path: Path) -> None:
    done = run(SOLVE, install(tmp_path, "red_half:RED_HALF"))

    assert done.stdout.split() == ["True", "True", "True", "True", "True", "False"], done.stderr


@pytest.mark.parametrize(
    ("entry_point", "complaint"),
    [
        ("red_half:Halves", "expected an Environment at 'red_half:Halves'"),
        ("red_halves:RED_HALF", "No module named 'red_halves'"),
        ("red_half:HALF", "has no attribute 'HALF'"),
    ],
)
def test_a_package_whose_entry_point_leads_nowhere_is_named(tmp_path: Path, entry_point: str, complaint: str) -> None:
    done = run("import cua_rl.environments.table", install(tmp_path, entry_point))

    assert complaint in done.stderr
    assert "ConfigError" in done.stderr
    assert "an entry point 'cua_rl.environments'" in done.stderr
