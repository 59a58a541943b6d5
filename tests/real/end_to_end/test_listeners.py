"""Who can reach what of a run on a machine that others use too."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.live_processes import command_line
from tests.real.end_to_end.runs import Run, survivors

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(shutil.which("node") is None, reason="the agent of this test is a Node program; install Node")
def test_a_stranger_gets_nothing_from_any_listener_of_a_run(tmp_path: Path) -> None:
    agent = f"{shutil.which('node')} {ROOT / 'examples' / 'agents' / 'agent.mjs'}"
    run = Run(tmp_path / "run", "max_steps=3", "trainer.num_processes=2", "agent=external", f"agent.command={agent}")
    try:
        run.wait_for(lambda: [one for one in run.owned() if is_agent(one)])  # everything else runs before an agent does
        command = [sys.executable, "-m", "scripts.listeners", str(run.process.pid)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        owned = run.owned()
    finally:
        run.signal(signal.SIGINT)
        run.finish()

    assert [row for row in rows if row["is_open"]] == [], done.stderr
    assert done.returncode == 0
    addresses = [row["address"] for row in rows]
    assert any(address.endswith("/vllm.sock") for address in addresses)
    assert any(".s.PGSQL" in address for address in addresses)
    assert {row["address"].rpartition(":")[0] for row in rows if row["kind"] == "tcp"} == {"127.0.0.1"}
    assert not [row for row in rows if row["kind"] == "udp"]
    assert survivors(owned) == []


def is_agent(process: psutil.Process) -> bool:
    words = command_line(process)
    return bool(words) and words[0].endswith("node") and any("agent.mjs" in word for word in words)
