"""Merged weights against the base model with its adapter."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from cua_rl.training.config import TrainerConfig
from cua_rl.training.model_files import merge_adapter
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Datum
from tests.real.training.test_exactness import load_stock, stock_logprobs
from tests.real.training.trainer_calls import moved


@pytest.fixture
def adapter(config: TrainerConfig, datums: list[Datum], tmp_path: Path) -> Path:
    moved(Trainer(config), datums).save_weights_for_sampler(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(20, 60)[None]).logits


def new_folder(tmp_path: Path) -> Path:
    (tmp_path / "merged").mkdir()
    return tmp_path / "merged"


def test_a_merged_model_computes_what_the_base_model_computes_with_the_adapter(
    config: TrainerConfig, datums: list[Datum], adapter: Path, tmp_path: Path
) -> None:
    merged = merge_adapter(config.model_path, adapter, folder := new_folder(tmp_path), "auto")

    base, alone = load_stock(config.model_path), load_stock(folder)
    before = logits(base)
    adapted = PeftModel.from_pretrained(base, adapter)
    assert (logits(alone) - logits(adapted)).abs().max() < 1e-4
    assert (before - logits(adapted)).abs().max() > 0.01
    for datum in datums:
        one, other = (stock_logprobs(model, config.model_path, datum) for model in (alone, adapted))
        assert (one - other).abs().max() < 1e-4
    assert (merged.dtype, merged.rounding < 1e-5) == ("float32", True)
    assert (folder / "preprocessor_config.json").is_file()


def test_an_older_checkpoints_names_of_tensors_are_kept(config: TrainerConfig, adapter: Path, tmp_path: Path) -> None:
    """Qwen2.5-VL is published with `model.layers.0`, where Transformers has `model.language_model.layers.0`."""
    older = tmp_path / "older"
    older.mkdir()
    tensors = load_file(config.model_path / "model.safetensors")
    renamed = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, older / "model.safetensors")
    (older / "config.json").write_text((config.model_path / "config.json").read_text())

    merge_adapter(older, adapter, folder := new_folder(tmp_path), "auto")

    found = load_file(folder / "model.safetensors")
    assert found.keys() == renamed.keys()
    changed = {name for name in found if not torch.equal(found[name], renamed[name])}
    assert len(changed) == 3 * 7  # layers, linear maps of a layer
    assert all(name.startswith("model.layers.") for name in changed)


def test_rounding_in_half_precision_is_measured(config: TrainerConfig, adapter: Path, tmp_path: Path) -> None:
    merged = merge_adapter(config.model_path, adapter, folder := new_folder(tmp_path), "bfloat16")

    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    assert merged.dtype == "bfloat16"
    assert 1e-3 < merged.rounding < 1.0


def test_weights_in_several_files_are_merged_file_by_file(config: TrainerConfig, adapter: Path, tmp_path: Path) -> None:
    load_stock(config.model_path).save_pretrained(tmp_path / "split", max_shard_size="200KB")

    merge_adapter(tmp_path / "split", adapter, folder := new_folder(tmp_path), "float32")

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    adapted = PeftModel.from_pretrained(load_stock(config.model_path), adapter)
    assert (logits(load_stock(folder)) - logits(adapted)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"use_dora": True}, "expected a plain LoRA adapter .* use_dora"),
        ({"bias": "all"}, "expected a plain LoRA adapter .* biases"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(
    config: TrainerConfig, adapter: Path, tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | change))
    with pytest.raises(ConfigError, match=complaint):
        merge_adapter(config.model_path, adapter, new_folder(tmp_path), "auto")


def test_an_adapter_with_layers_that_the_model_does_not_have_is_refused(
    config: TrainerConfig, adapter: Path, tmp_path: Path
) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({name.replace("layers.2.", "layers.9."): tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match=r"'layers\.9\..*which the model does not have"):
        merge_adapter(config.model_path, adapter, new_folder(tmp_path), "auto")


def test_a_quantized_base_model_is_refused(config: TrainerConfig, adapter: Path, tmp_path: Path) -> None:
    base = tmp_path / "quantized"
    base.mkdir()
    settings = json.loads((config.model_path / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="full or half precision"):
        merge_adapter(base, adapter, new_folder(tmp_path), "auto")
