"""Supervised runs with the real trainer on the tiny model."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.sft import main
from cua_rl.recipes.train import main as train
from cua_rl.renderers.renderer import make_renderer
from cua_rl.reporting.json_lines import read_records, write_records

SMALL = ["batch_size=2", "num_eval_conversations=2", "save_every=1", "eval_every=2", "num_threads=1"]


def run(log_path: Path, *arguments: str) -> None:
    assert main([f"log_path={log_path}", *SMALL, *arguments]) == 0


def losses(log_path: Path) -> list[tuple[object, object, object]]:
    """Step, training loss and held-out loss of everything logged."""
    return [
        (record["step"], record.get("loss/cross_entropy"), record.get("eval/held_out/cross_entropy"))
        for record in read_records(log_path / "metrics.jsonl")
    ]


def cut_back(log_path: Path, num_checkpoints: int) -> None:
    """As a crash would leave the folder: metrics are ahead of the last checkpoint."""
    checkpoints = read_records(log_path / "checkpoints.jsonl")
    write_records(log_path / "checkpoints.jsonl", checkpoints[:num_checkpoints])


@pytest.mark.parametrize("weights", ["lora_rank=8", "lora_rank=0"])
def test_an_interrupted_run_that_resumes_has_the_loss_curve_of_one_that_never_stopped(
    tmp_path: Path, weights: str
) -> None:
    arguments = ["error_rate=0.5", "max_steps=4", weights]
    run(tmp_path / "whole", *arguments)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut_back(tmp_path / "cut", 2)
    run(tmp_path / "cut", *arguments, "behavior_if_log_dir_exists=resume")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    # the baseline, four steps, and two evaluations
    assert [step for step, _, _ in losses(tmp_path / "whole")] == [0, 1, 2, 2, 3, 4, 4]


def test_two_trainer_processes_have_the_loss_curve_of_one(tmp_path: Path) -> None:
    arguments = ["max_steps=2", "num_eval_conversations=3"]  # of three datums, one process has one
    run(tmp_path / "one", *arguments)
    run(tmp_path / "two", *arguments, "num_processes=2")

    curves = [
        [number for record in losses(tmp_path / name) for number in record if isinstance(number, float | int)]
        for name in ("one", "two")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)  # float32, two steps


def test_a_run_with_an_adapter_writes_what_sampler_and_trainer_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", "max_steps=2", "learning_rate=0.01")
    folder = tmp_path / "run"
    assert {file.name for file in (folder / "sampler_weights" / "000002").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert (folder / "weights" / "000002" / "checkpoint.json").is_file()
    assert [record["final"] for record in read_records(folder / "checkpoints.jsonl")] == [False, True]
    assert f"load_checkpoint_path={folder / 'weights' / '000002'}" in capsys.readouterr().out
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary["last_held_out_loss"] < summary["first_held_out_loss"]
    run(tmp_path / "next", "max_steps=1", f"load_checkpoint_path={folder / 'weights' / '000002'}")
    # the next run starts where the first one ended: the same held-out demonstrations, the same weights
    assert losses(tmp_path / "next")[0][2] == summary["last_held_out_loss"]


def test_a_run_without_an_adapter_writes_a_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a run", "max_steps=1", "lora_rank=0", "max_pixels=65536")
    model = tmp_path / "a run" / "sampler_weights" / "000001"
    assert make_renderer(model).name == "qwen3_vl"
    assert {file.name for file in model.iterdir()} >= {file.name for file in TINY_QWEN3_VL.iterdir()} - {"README.md"}
    said = capsys.readouterr().out
    (arguments,) = re.findall(r"go on: python -m cua_rl\.recipes\.train (.+)", said)
    assert shlex.split(arguments) == [f"model_name={model}", "server.max_pixels=65536"]
    assert train([*shlex.split(arguments), "dry_run=true"]) == 0


def test_conversations_from_a_file_are_learned(tmp_path: Path) -> None:
    user = {"role": "user", "content": "List the apps you see. Mail Maps Clock"}
    path = tmp_path / "talks.jsonl"
    talks = [{"messages": [user, {"role": "assistant", "content": name}]} for name in (" Mail", " Mail", " Mail")]
    write_records(path, [*talks, {"messages": [user, {"role": "assistant", "content": " Maps"}]}])
    run(tmp_path / "run", f"data={path}", "max_steps=8", "num_eval_conversations=0", "learning_rate=0.01")
    curve = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert len(curve) == 8
    assert isinstance(curve[0], float)
    assert isinstance(curve[-1], float)
    assert curve[-1] < curve[0] / 2
