"""Plans for other machines, typed on this one, which may have no GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes import evaluate, sft, train
from tests.builders import NO_TENSORS

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parent / "model_configs"
SHORT = "server.max_model_len=8192 server.max_pixels=786432 max_tokens=512 max_turns=6"

COMMANDS = {
    f"train 4B {SHORT} machine=1x24": ("offload", 1),
    f"train 4B {SHORT} machine=1x22.5": ("offload", 1),
    f"train 2B {SHORT} machine=1x16": ("offload", 1),
    f"train 4B {SHORT} machine=1x80": ("replicated", 1),
    f"train 8B {SHORT} machine=2x80": ("replicated", 1),
    f"train 8B {SHORT} machine=2x48": ("replicated", 1),
    f"train 32B {SHORT} machine=4x80": ("full", 2),
    f"train 32B {SHORT} machine=8x141": ("replicated", 4),
    f"train 30B-A3B {SHORT} machine=8x80": ("full", 4),
    f"train 30B-A3B {SHORT} machine=8x80 trainer.sharding=full": ("full", 4),
    f"train 30B-A3B {SHORT} machine=1x192": ("replicated", 1),
    f"train 8B {SHORT} machine=4x80 trainer.sharding=full": ("full", 2),
    "sft 2B data=experts max_model_len=8192 machine=4x80 lora_rank=0": ("replicated", 4),
    f"train 4B {SHORT} machine=4x80 trainer.loader=unsloth": ("replicated", 2),
    f"train 4B {SHORT} machine=1x80 trainer.kernels=compiled": ("replicated", 1),
    "train 4B preset=24gb-4b machine=1x22.5": ("offload", 1),
    "train 4B preset=h100-4b machine=1x79.6": ("replicated", 1),
    "train 8B preset=h100-8b machine=1x79.6": ("replicated", 1),
    "train 32B preset=4xh100-32b machine=4x79.6": ("full", 2),
    "train 30B-A3B preset=8xh100-30b-a3b machine=8x79.6": ("replicated", 4),
    "evaluate 4B max_turns=6 max_tokens=512 machine=1x24": (None, 0),
    "evaluate 30B-A3B max_turns=6 max_tokens=512 machine=8x141": (None, 0),
    "sft 4B data=experts max_model_len=8192 machine=1x24": ("replicated", 1),
    "sft 30B-A3B data=experts max_model_len=8192 machine=8x80": ("full", 8),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the published sizes, without weights."""
    folder = tmp_path_factory.mktemp("models")
    for size in ("2B", "4B", "8B", "32B", "30B-A3B"):
        shutil.copytree(TINY_QWEN3_VL, folder / size, ignore=shutil.ignore_patterns("*.safetensors"))
        shutil.copy(MODELS / f"Qwen3-VL-{size}-Instruct" / "config.json", folder / size)
        (folder / size / "model.safetensors").write_bytes(NO_TENSORS)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_plan_for_another_machine_is_made_wherever_it_is_typed(
    command: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, size, *settings = command.split()
    main = {"train": train.main, "evaluate": evaluate.main, "sft": sft.main}[recipe]

    status = main([f"model_name={models / size}", "dry_run=true", f"log_path={tmp_path / 'run'}", *settings])

    said = capsys.readouterr()
    assert status == 0, said.err
    effective = json.loads(said.out)
    sharding, num_processes = COMMANDS[command]
    if recipe == "evaluate":
        assert "server, per GPU" in said.err
    else:
        assert effective["memory_plan"]["settings"]["trainer.sharding"] == sharding
        assert effective["gpu_plan"]["trainer"]["num_processes"] == num_processes


def test_the_launch_script_plans_for_other_gpus_with_another_loader(models: Path, tmp_path: Path) -> None:
    command = [ROOT / "scripts" / "train_multi.sh", "--gpus", "4", "--loader", "unsloth", "machine=4x80"]
    settings = ["dry_run=true", f"model_name={models / '4B'}", f"log_path={tmp_path / 'run'}", "device=simulator"]
    environ = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    source = 'tasks={"source_type": "demo_training"}'
    done = subprocess.run(
        [*command, *settings, source],
        capture_output=True,
        text=True,
        check=False,
        env=environ | {"PYTHON": sys.executable},
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gpu_plan"]["trainer"]["num_processes"] == 2
