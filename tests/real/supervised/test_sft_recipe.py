"""Supervised runs with the real trainer on the tiny model."""

import io
import json
import re
import shlex
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.sft import main
from cua_rl.recipes.train import main as train
from cua_rl.renderers.renderer import make_renderer
from cua_rl.reporting.json_lines import read_records, write_records

SMALL = ["batch_size=2", "num_eval_conversations=2", "save_every=1", "eval_every=2", "trainer.num_threads=1"]
# of three datums, one of two processes has one
WITH_ADAPTER = ("error_rate=0.5", "max_steps=4", "lora_rank=8", "num_eval_conversations=3", "learning_rate=0.003")


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


@pytest.fixture(scope="module")
def with_adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of four steps, and what it said."""
    folder, said = tmp_path_factory.mktemp("sft") / "run", io.StringIO()
    with redirect_stdout(said):
        run(folder, *WITH_ADAPTER)
    return folder, said.getvalue()


def assert_goes_on_as_if_it_had_never_stopped(whole: Path, cut: Path, *arguments: str) -> None:
    shutil.copytree(whole, cut)
    cut_back(cut, 2)
    run(cut, *arguments, "behavior_if_log_dir_exists=resume")
    assert losses(cut) == losses(whole)
    # the baseline, four steps, and two evaluations
    assert [step for step, _, _ in losses(whole)] == [0, 1, 2, 2, 3, 4, 4]


def test_an_interrupted_run_that_resumes_has_the_loss_curve_of_one_that_never_stopped(
    with_adapter: tuple[Path, str], tmp_path: Path
) -> None:
    assert_goes_on_as_if_it_had_never_stopped(with_adapter[0], tmp_path / "cut", *WITH_ADAPTER)


def test_two_trainer_processes_have_the_loss_curve_of_one(with_adapter: tuple[Path, str], tmp_path: Path) -> None:
    run(tmp_path / "two", *WITH_ADAPTER, "num_processes=2")

    curves = [
        [number for record in losses(folder)[:4] for number in record if isinstance(number, float | int)]
        for folder in (with_adapter[0], tmp_path / "two")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)  # float32; the baseline, two steps and an evaluation


def test_a_run_with_an_adapter_writes_what_sampler_and_trainer_load(
    with_adapter: tuple[Path, str], tmp_path: Path
) -> None:
    folder, said = with_adapter
    assert {file.name for file in (folder / "sampler_weights" / "000004").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert (folder / "weights" / "000004" / "checkpoint.json").is_file()
    assert [record["final"] for record in read_records(folder / "checkpoints.jsonl")] == [False, False, False, True]
    assert f"load_checkpoint_path={folder / 'weights' / '000004'}" in said
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary["last_held_out_loss"] < summary["first_held_out_loss"]
    next_run = (*WITH_ADAPTER, "max_steps=1", f"load_checkpoint_path={folder / 'weights' / '000004'}")
    run(tmp_path / "next", *next_run)
    # the next run starts where the first one ended: the same held-out demonstrations, the same weights
    assert losses(tmp_path / "next")[0][2] == summary["last_held_out_loss"]


def test_a_run_without_an_adapter_writes_a_whole_model_and_resumes_as_one_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("error_rate=0.5", "max_steps=4", "lora_rank=0", "max_pixels=65536")
    run(tmp_path / "a run", *arguments)
    model = tmp_path / "a run" / "sampler_weights" / "000004"
    assert make_renderer(model).name == "qwen3_vl"
    assert {file.name for file in model.iterdir()} >= {file.name for file in TINY_QWEN3_VL.iterdir()} - {"README.md"}
    said = capsys.readouterr().out
    (go_on,) = re.findall(r"continue with: python -m cua_rl\.recipes\.train (.+)", said)
    assert shlex.split(go_on) == [f"model_name={model}", "server.max_pixels=65536"]
    assert train([*shlex.split(go_on), "dry_run=true"]) == 0

    assert_goes_on_as_if_it_had_never_stopped(tmp_path / "a run", tmp_path / "cut", *arguments)


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
