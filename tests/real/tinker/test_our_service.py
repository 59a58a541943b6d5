"""Our Tinker service, with trainer and vLLM on the included tiny model: the conformance suite, and our own recipe."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.patience import patience
from tests.real.tinker.conftest import ENVIRONMENT, KEY, PACKAGES, ROOT, serving
from tests.real.tinker.same_training import LOSSES, train_natively

TRAIN = "import sys; sys.path.append(sys.argv.pop(1)); from cua_rl.recipes.train import main; sys.exit(main())"
"""With the SDK's packages behind our own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the service runs."""
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def service(folder: Path) -> Generator[str]:
    """The address of a service."""
    with serving(folder, "lora_rank=32", "server.max_model_len=2048") as address:
        yield address


def train(*settings: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TRAIN, str(PACKAGES), *settings]
    environment = {**ENVIRONMENT, "TINKER_API_KEY": key}
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


@pytest.fixture(scope="module")
def trained(service: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What the same steps leave of a trainer of one's own, and of the service."""
    native, there = tmp_path_factory.mktemp("native"), tmp_path_factory.mktemp("there")
    asyncio.run(train_natively(native))
    command = [sys.executable, "-m", "tests.real.tinker.same_training", str(PACKAGES), service, str(there)]
    subprocess.run(command, check=True, cwd=ROOT, env=ENVIRONMENT, timeout=patience(180))
    return native, there


@pytest.mark.parametrize("case", LOSSES)
def test_steps_on_the_service_are_those_of_a_trainer_of_ones_own(
    folder: Path, trained: tuple[Path, Path], case: str
) -> None:
    """Of our recipe, on rollouts with screenshots: the service gets the weight of a datum in its advantages."""
    native, there = (path / case for path in trained)
    kept = {name: find_kept(folder / "run", there / name) for name in ("state", "adapter")}
    norms = [torch.tensor(json.loads((path / "norms.json").read_text())) for path in (native, there)]
    # Adam's first moment after one step is a tenth of the gradient
    gradients = [first_moments(path) for path in (native / "state", kept["state"])]
    first = all_weights(native / "state")
    moves = [all_weights(path) - first for path in (native / "adapter", kept["adapter"])]
    if case == "all_text":
        for ours, theirs in (norms, gradients, moves):
            assert torch.equal(ours, theirs)
        return
    # but for rounding; that of a gradient near 0 may turn the step of its weight round, which is as long as any other
    assert (gradients[1] - gradients[0]).norm() < 1e-6 * gradients[0].norm()
    assert (moves[1] - moves[0]).norm() < 1e-3 * moves[0].norm()
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0.0)


def find_kept(service: Path, pointer: Path) -> Path:
    """The folder of the service that a run's pointer names."""
    path = json.loads((pointer / "tinker.json").read_text())["path"]
    model, kind, name = path.removeprefix("tinker://").split("/")
    return next((service / kind / model.replace(":", ".")).glob(f"{name}~*"))


def all_weights(adapter: Path) -> torch.Tensor:
    """All of them as one row."""
    return torch.cat(
        [weight.flatten() for _, weight in sorted(load_file(adapter / "adapter_model.safetensors").items())]
    )


def first_moments(checkpoint: Path) -> torch.Tensor:
    """All of them as one row."""
    contents = torch.load(checkpoint / "trainer_state.pt", weights_only=True)
    return torch.cat([one["exp_avg"].flatten() for one in contents["optimizer"]["state"].values()])


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
