"""Both recipes that train, with a trainer on two nodes of a Ray cluster."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from cua_rl.reporting.json_lines import read_records
from cua_rl.sampling.server import VllmServer
from tests.real.end_to_end.runs import Run, survivors
from tests.real.training.test_nodes import Host, hosts, running_cluster
from tests.real.training.test_ranks import NUM_ROUNDINGS
from tests.rounding import assert_equal_but_for_rounding

__all__ = ["hosts"]
FINE_TUNING = ("batch_size=3", "num_eval_conversations=2", "max_steps=2", "error_rate=0.5", "lora_rank=8")


async def fine_tune(folder: Path, *options: str) -> list[float]:
    """The losses of a supervised run, of held-out answers and of its batches."""
    command = [sys.executable, "-m", "cua_rl.recipes.sft", f"log_path={folder}", *FINE_TUNING, *options]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_records(folder / "metrics.jsonl")
    names = ("eval/held_out/cross_entropy", "loss/cross_entropy")
    return [cast("float", record[name]) for name in names for record in records if name in record]


@pytest.mark.timeout(900)
async def test_a_reinforced_and_a_supervised_run_train_on_two_nodes(
    hosts: tuple[Host, Host], server: VllmServer, tmp_path: Path
) -> None:
    expected = await fine_tune(tmp_path / "alone", "trainer.num_threads=1")
    async with running_cluster(hosts, tmp_path):
        losses = await fine_tune(tmp_path / "fine-tuned", "trainer.num_nodes=2")
        options = (f"base_url={server.base_url}", "trainer.num_nodes=2", "max_steps=2", "eval_tasks=none")
        run = Run(tmp_path / "run", *options, "monitor=false")
        await asyncio.to_thread(run.wait_for, run.steps)
        owned = run.owned()
        status = await asyncio.to_thread(run.finish)

    assert_equal_but_for_rounding(losses, expected, NUM_ROUNDINGS, magnitude=1.0)
    assert status == 0, run.output()
    assert [step["step"] for step in run.steps()] == [1, 2]
    assert all(step["trainer/restarts"] == 0 for step in run.steps())
    for folder in (tmp_path / "fine-tuned", run.folder):
        assert len(sorted((folder / "logs").glob("trainer-[12].log"))) == 2
    assert survivors(owned) == []
