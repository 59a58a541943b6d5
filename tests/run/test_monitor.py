"""The monitor process of a run."""

from contextlib import AsyncExitStack
from pathlib import Path

from cua_rl.run.monitor import show_run
from cua_rl.run.training_config import MonitorSettings


async def test_two_runs_that_start_at_once_have_monitors_at_two_addresses(tmp_path: Path) -> None:
    nowhere = "postgresql://127.0.0.1:1/none"
    async with AsyncExitStack() as stack:
        addresses = [await show_run(stack, MonitorSettings(), nowhere, tmp_path / name) for name in "ab"]
    assert len(set(addresses)) == 2
