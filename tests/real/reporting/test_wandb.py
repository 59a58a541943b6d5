"""The real Weights & Biases package, in its offline mode and without an account."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import IdleClock

pytest.importorskip("wandb", reason="`make setup` installs wandb")

import wandb
from wandb.proto import wandb_internal_pb2

ROOT = Path(__file__).parents[3]

WANDB_PROGRAM = """
from pathlib import Path
from cua_rl.reporting.metric_log import MetricLog
with MetricLog(Path("run"), config={"group_size": 4}, wandb_project="agents") as log:
    log.log(1, {"reward/mean": 0.5, "rollout/num_rollouts": 8})
    log.log(2, {"reward/mean": 0.75})
"""


def run_wandb_program(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real package in a process of its own, which knows no account and reaches no server."""
    away = {"HOME": str(folder), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_ERROR_REPORTING": "false"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", WANDB_PROGRAM],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT)} | away | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        umask=0o066,
    )


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a run file: after 7 bytes of its own, LevelDB's log format in blocks of 32 KiB."""
    place, parts = 7, b""
    while place < len(data):
        if (left := 32768 - place % 32768) < 7:  # a block ends with zeros where no header fits
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)  # after a checksum of 4 bytes
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_weights_and_biases_offline_keeps_the_metrics_in_the_runs_folder(tmp_path: Path) -> None:
    done = run_wandb_program(tmp_path, WANDB_MODE="offline")

    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file.read_bytes())]
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.run_id) == ("agents", "run")
    assert {item.key: item.value_json for item in run.config.update}["group_size"] == "4"
    rows = [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    logged = [{name: value for name, value in row.items() if "/" in name} for row in rows]
    assert [row["_step"] for row in rows] == [1, 2]
    assert logged == [{"reward/mean": 0.5, "rollout/num_rollouts": 8}, {"reward/mean": 0.75}]


def test_only_their_owner_reads_the_files_although_the_program_that_started_the_run_uses_the_package(
    tmp_path: Path,
) -> None:
    wandb.setup()
    try:
        done = run_wandb_program(tmp_path, WANDB_MODE="offline", WANDB_SERVICE=os.environ["WANDB_SERVICE"])
    finally:
        wandb.teardown()

    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix == ".wandb"]
    assert [path for path in files if path.stat().st_mode & 0o066] == []


def test_weights_and_biases_without_an_account_is_a_configuration_error(tmp_path: Path) -> None:
    done = run_wandb_program(tmp_path)

    assert done.returncode == 1
    assert "expected a key of Weights & Biases, got none with wandb_project='agents'" in done.stderr
    assert "or set WANDB_MODE=offline" in done.stderr


def test_a_weights_and_biases_server_that_is_away_stops_the_run_within_a_minute(tmp_path: Path) -> None:
    clock = IdleClock()

    done = run_wandb_program(tmp_path, WANDB_API_KEY="0" * 40)  # has the form of a key, so the server is asked

    assert done.returncode == 1
    assert "ConfigError: expected Weights & Biases to open project 'agents'" in done.stderr
    assert "WANDB_MODE=offline to keep the run in its folder" in done.stderr
    assert clock.look() < 60
