"""What can be exported, and what the model card says of it; the weights are the matter of tests/real."""

import json
import shutil
from pathlib import Path

import pytest

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.export_model import ExportModelConfig, find_source, main
from cua_rl.run_folder.model_card import ExportKind, format_model_card

SETTINGS = {
    "run_name": "phones",
    "model_name": "Qwen/Qwen3-VL-4B-Instruct",
    "tasks": [{"source_type": "gym", "gym_base_url": "http://gym.internal:5010"}, {"source_type": "demo_training"}],
    "eval_tasks": {"source_type": "demo_eval"},
    "lora_rank": 32,
    "trainer": {"lora_alpha": 64},
    "learning_rate": 1e-5,
    "loss": {"name": "ppo"},
    "advantages": "mean",
    "group_size": 4,
    "groups_per_batch": 10,
}
EVALUATION = {
    "eval/held_out/success_rate": 0.75,
    "eval/held_out/success_rate_low": 0.63,
    "eval/held_out/success_rate_high": 0.84,
    "eval/held_out/num_rollouts": 64.0,
}
METRICS = [{"step": 0, **EVALUATION, "eval/held_out/success_rate": 0.5}, {"step": 1}, {"step": 20, **EVALUATION}]


def card(step: int = 20, **changes: object) -> str:
    return format_model_card(
        SETTINGS | changes,
        METRICS,
        step=step,
        kind="merged",
        dtype="bfloat16",
        hub_base="Qwen/Qwen3-VL-4B-Instruct",
        rounding=0.043,
    )


def test_the_card_names_base_data_steps_and_success_with_its_interval() -> None:
    text = card()

    assert text.startswith("---\nbase_model: Qwen/Qwen3-VL-4B-Instruct\nlibrary_name: transformers\n")
    assert "| data | tasks: gym, demo_training |" in text
    assert "| weights | LoRA adapter, rank 32, alpha 64 |" in text
    assert "| steps | 20, learning rate 1e-05 |" in text
    assert "| held out, before training (tasks: demo_eval) | success 50.0 %" in text
    assert (
        "| held out, this model (tasks: demo_eval) | success 75.0 % (95 % interval 63.0-84.0 %, 64 rollouts) |" in text
    )
    assert "rounding changed the update by 4.3 % of its norm" in text


def test_the_card_tells_no_address_of_the_run() -> None:
    assert "gym.internal" not in card()


def test_the_card_says_so_if_the_exported_step_was_not_evaluated() -> None:
    assert "| held out, this model | not evaluated at this step |" in card(step=1)


def test_the_card_of_a_supervised_run_has_its_data_and_loss() -> None:
    text = format_model_card(
        SETTINGS | {"data": "experts", "data_description": "demonstrations of 9 tasks"},
        [{"step": 20, "eval/held_out/cross_entropy": 0.1234}],
        step=20,
        kind="adapter",
        dtype="",
        hub_base=None,
        rounding=0.0,
    )
    assert "| data | demonstrations of 9 tasks |" in text
    assert "loss 0.1234 nats per token" in text
    assert "vllm serve PATH_OF_THE_BASE_MODEL --enable-lora --max-lora-rank 32" in text
    assert "base_model:" not in text


def test_the_card_serves_the_model_as_it_was_trained() -> None:
    trained = SETTINGS | {"lora_rank": 24, "server": {"max_pixels": 1048576}}
    whole = {"lora_alpha": 64, "lora_modules": ["language", "merger", "vision"]}

    def command(kind: ExportKind, **changes: object) -> str:
        text = format_model_card(
            trained | changes, [], step=1, kind=kind, dtype="bfloat16", hub_base="Qwen/Base", rounding=0.0
        )
        return text.partition("```bash\n")[2].partition("\n")[0]

    # vLLM has no slots of rank 24, and by itself neither a smaller limit for screenshots nor adapters in the tower
    assert command("merged") == """vllm serve PATH_OF_THIS_FOLDER --mm-processor-kwargs '{"max_pixels": 1048576}'"""
    assert command("adapter", server={}) == (
        "vllm serve Qwen/Base --enable-lora --max-lora-rank 32 --lora-modules policy=PATH_OF_THIS_FOLDER"
    )
    assert "--max-lora-rank 32 --enable-tower-connector-lora --lora-modules" in command("adapter", trainer=whole)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that trained all weights, with one checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(TINY_QWEN3_VL, folder / "sampler_weights" / "000002")
    (folder / "config.json").write_text(json.dumps(SETTINGS | {"model_path": str(TINY_QWEN3_VL)}))
    checkpoint = {"step": 2, "state_path": "weights/000002", "sampler_path": "sampler_weights/000002"}
    (folder / "checkpoints.jsonl").write_text(json.dumps(checkpoint) + "\n")
    return folder


def test_the_newest_checkpoint_is_exported_unless_another_is_named(run: Path, tmp_path: Path) -> None:
    source = find_source(ExportModelConfig(run=run, out=tmp_path / "out"))
    assert (source.step, source.adapter) == (2, None)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run={place}/nothing"], "run: expected the folder of a run with a checkpoint"),
        (["run={place}/run", "step=7"], "step: expected one of the checkpoints [2]\n    got 7"),
        (["run={place}/run", "kind=adapter"], "expected merged for a run that trained all weights"),
        (["run={place}/run", "out={place}/run"], "out: expected a folder that does not exist"),
        (["run={place}/run", "out={place}/run/config.json/out"], "out: expected a folder that can be made"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_reason(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    words = [word.format(place=tmp_path) for word in arguments]
    assert main([f"out={tmp_path / 'out'}", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run / "sampler_weights" / "000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main([f"run={run}", f"out={tmp_path / 'out'}"]) == 2
    assert "is cut short" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
