"""Our Tinker service, with trainer and vLLM on the included tiny model: the conformance suite, and our own recipe."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.patience import patience
from tests.real.tinker.conftest import PACKAGES, ROOT

KEY = "tml-key-of-the-tests"
TRAIN = "import sys; sys.path.append(sys.argv.pop(1)); from cua_rl.recipes.train import main; sys.exit(main())"
"""With the SDK's packages behind our own."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The address of a service."""
    folder = tmp_path_factory.mktemp("service")
    settings = ("port=0", f"log_path={folder / 'run'}", "lora_rank=32", "server.max_model_len=2048")
    with (folder / "out.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cua_rl.recipes.serve_tinker", *settings],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TINKER_API_KEY": KEY},
            cwd=ROOT,
        )
    try:
        limit = time.monotonic() + patience(120)
        while (found := re.search(r"TINKER_BASE_URL=(\S+)", (folder / "out.log").read_text())) is None:
            assert process.poll() is None, (folder / "out.log").read_text()[-3000:]
            assert time.monotonic() < limit, (folder / "out.log").read_text()[-3000:]
            time.sleep(0.5)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(patience(60))


def train(*settings: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRAIN, str(PACKAGES), *settings]
    environment = {**os.environ, "TINKER_API_KEY": key}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=patience(300)
    )


def test_a_run_trains_and_resumes_on_the_service(service: str, tmp_path: Path) -> None:
    """Two steps, then a third from the checkpoint, by another session on the service."""
    folder = tmp_path / "run"
    # 32 rollouts a step, of which some succeed: a step without a signal would leave the policy as it is
    small = ("groups_per_batch=4", "group_size=8", "evaluation.num_eval_rollouts=4", "monitor.show=false")
    began = train("training=tinker", f"base_url={service}", f"log_path={folder}", "max_steps=2", "save_every=1", *small)
    assert began.returncode == 0, began.stderr[-3000:]
    went_on = train(f"log_path={folder}", "behavior_if_log_dir_exists=resume", "max_steps=3")
    assert went_on.returncode == 0, went_on.stderr[-3000:]

    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "policy/parity_mean_abs" in step]
    versions = [step["progress/policy_version"] for step in trained]
    assert versions == [*range(1, len(trained) + 1)]
    assert trained[-1]["step"] == 3
    # float32 here and there: rounding is 1e-6, another policy than the one that sampled some 0.1
    assert max(step["policy/parity_mean_abs"] for step in trained) < 1e-4
    assert all(step["optim/grad_norm"] > 0.0 for step in trained)
    pointers = [json.loads(path.read_text()) for path in sorted(folder.glob("weights/*/tinker.json"))]
    assert [pointer["path"].startswith("tinker://") for pointer in pointers] == [True] * 3
    assert pointers[-1]["policy_version"] == versions[-1]
    assert [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []
    assert KEY not in began.stdout + began.stderr + went_on.stdout + went_on.stderr


def test_the_conformance_suite_finds_no_failure(service: str, tmp_path: Path) -> None:
    """By the unmodified SDK: T0 the wire, T1 text, T2 images, T3 several models and clients."""
    results = tmp_path / "results.json"
    command = [ROOT / ".venv-tinker/bin/python", "-m", "tinker_conformance", f"--base-url={service}"]
    options = [f"--api-key={KEY}", f"--json={results}", "--time-limit", str(patience(60)), "--tier"]
    done = subprocess.run(
        [*command, *options, "T0", "T1", "T2", "T3"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=patience(600),
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_wrong_key_ends_the_run_before_it_begins(service: str, tmp_path: Path) -> None:
    refused = train(
        "training=tinker", f"base_url={service}", f"log_path={tmp_path / 'run'}", key="tml-another-key-here"
    )
    assert refused.returncode == 2
    assert "tinker_api_key: expected one that" in refused.stderr
    assert not (tmp_path / "run").exists()
