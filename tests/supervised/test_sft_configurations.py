"""Every bad configuration of a supervised run ends at once, with expected, got and what to do, before a model loads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.sft import main
from cua_rl.reporting.json_lines import read_records
from cua_rl.run.prepared_sft import require_recorded_size
from cua_rl.run_folder.model_folder import make_image_renderer
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import ImageChunk
from tests.builders import NO_TENSORS


def conversation(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": text}]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with things that configurations can point at."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "good.jsonl").write_text("".join(json.dumps(conversation(text)) + "\n" for text in ("Wi-Fi", "Maps")))
    (folder / "bad.jsonl").write_text(json.dumps(conversation("Wi-Fi")) + "\n{}\n")
    (folder / "text_model").mkdir()
    (folder / "text_model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "text_model" / "tokenizer.json").write_bytes((TINY_QWEN3_VL / "tokenizer.json").read_bytes())
    (folder / "text_model" / "model.safetensors").write_bytes(NO_TENSORS)
    shutil.copytree(TINY_QWEN3_VL, folder / "experts_model", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((TINY_QWEN3_VL / "config.json").read_text()) | {"model_type": "qwen3_vl_moe"}
    (folder / "experts_model" / "config.json").write_text(json.dumps(settings))
    (folder / "experts_model" / "model.safetensors").write_bytes(NO_TENSORS)
    (folder / "weights").mkdir()
    (folder / "weights" / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 32}))
    (folder / "sampler_weights").mkdir()
    (folder / "sampler_weights" / "adapter_config.json").write_text(json.dumps({"r": 16, "lora_alpha": 32}))
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(json.dumps({"data_sha256": "of other data", "batch_size": 16}))
    (folder / "run" / "metrics.jsonl").write_text("")
    return folder


BAD = [
    (["dat=experts"], "did you mean 'data'"),
    (["data=expert"], "data: expected experts, rollouts or a file that ends in .jsonl got 'expert'"),
    (["data={place}/nowhere.jsonl"], "expected a file of conversations"),
    (["data={place}/bad.jsonl"], "bad.jsonl:2: expected an object with either messages or input"),
    (["data={place}/good.jsonl"], "num_eval_conversations: expected conversations left to train on"),
    (["data={place}/good.jsonl", "num_eval_conversations=1", "error_rate=0.5"], "error_rate: expected it only with"),
    (["data=rollouts"], "from_run: expected a run with data=rollouts"),
    (["data=rollouts", "from_run={place}/run"], "from_run: expected the folder of a run with its own database"),
    (["from_run={place}/run"], "from_run: expected it only with data=rollouts"),
    (["run_steps=0", "data=rollouts", "from_run=x"], "run_steps: expected at least 1"),
    (["error_rate=1.5"], "error_rate: expected a share of turns"),
    (["lora_rank=1024"], "lora_rank: expected at most 512"),
    (["lora_rank=-1"], "lora_rank: expected at least 0"),
    (["num_eval_actions=9", "lora_rank=0"], "num_eval_actions: expected an adapter (lora_rank)"),
    (["num_eval_actions=9", "num_eval_conversations=0"], "num_eval_actions: expected an adapter (lora_rank)"),
    (["batch_size=0"], "batch_size: expected at least 1"),
    (["warmup_steps=100"], "warmup_steps: expected fewer than the 100 steps"),
    (["warmup_steps=5", "max_steps=5"], "warmup_steps: expected fewer than max_steps=5"),
    (["sharding=full"], "sharding: expected 'replicated' with one trainer process"),
    (["dry_run=true", "machine=1x0.5", "lora_rank=0"], "memory: expected a trainer of at least"),
    (["dry_run=true", "machine=1x1", "lora_rank=0"], "it fits with GPUs of 24 GiB"),
    (["machine=1x80"], "machine: expected it only with dry_run=true"),
    (["max_model_len=10000000"], "max_model_len: expected at most 4096"),
    (["max_model_len=64"], "max_model_len: expected conversations of at most 64 tokens"),
    (['tasks={{"source_type": "demo_trainig"}}'], "demo_training"),
    (["model_name={place}/nowhere"], "model_name: expected"),
    (["model_name={place}/text_model"], "a model that sees screenshots"),
    (["model_name={place}/experts_model", "data={place}/good.jsonl", "lora_rank=0"], "train an adapter"),
    (["load_checkpoint_path={place}/weights/000080"], "load_checkpoint_path: expected a folder weights/<step>"),
    (["load_checkpoint_path={place}/sampler_weights"], "so name weights/<step> of that run"),
    (["load_checkpoint_path={place}/weights"], "expected weights with lora_rank=16 lora_alpha=32"),
    (["log_path={place}", "num_eval_conversations=1"], "expected log_path to be a new folder"),
    (["log_path={place}/run", "behavior_if_log_dir_exists=resume", "max_steps=1"], "data_sha256: expected 'of other"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_a_bad_configuration_is_refused_with_status_2(
    place: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    assert main([argument.format(place=place) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert "Traceback" not in error


def test_screenshots_must_be_seen_as_they_were_recorded() -> None:
    image = EncodedImage(data=b"", format="png", width_px=1080, height_px=2400)
    # scaled to 320x736 pixels, 10 x 23 tokens, and by the model's own limit to 672x1504, 21 x 47
    recorded = [ImageChunk(image=image, expected_tokens=230)]

    require_recorded_size(recorded, make_image_renderer(TINY_QWEN3_VL, None, 512 * 512))
    with pytest.raises(ConfigError, match=r"max_pixels: expected .* 1080x2400 pixels in 230 tokens, .* got 987 with"):
        require_recorded_size(recorded, make_image_renderer(TINY_QWEN3_VL, None))


def test_a_dry_run_checks_the_data_and_says_what_it_found(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"data={place}/good.jsonl", "num_eval_conversations=1", f"log_path={tmp_path / 'run'}", "dry_run=true"]
    assert main(arguments) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["data_description"] == f"2 conversations in {place / 'good.jsonl'}"
    # one of the two is held out; one pass over the other in batches of 16 is one step
    assert (shown["num_train_conversations"], shown["num_held_out_conversations"], shown["num_steps"]) == (1, 1, 1)
    assert shown["memory_plan"]["settings"]["trainer.gradient_checkpointing"] is False
    assert not (tmp_path / "run").exists()
    assert read_records(tmp_path / "run" / "metrics.jsonl") == []
