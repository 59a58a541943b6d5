# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Optional libraries of the trainer: refused where they cannot work, and without effect on what is computed."""

import sys
from collections.abc import Generator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chz
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from cua_rl.errors import ConfigError
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.training.layers import PACKED_ATTENTION, require_separate_sequences
from cua_rl.training.libraries import require_libraries
from cua_rl.training.trainer import Trainer
from cua_rl.types import Datum
from tests.real.training.tiny_families import BUILDERS, make_datums
from tests.real.training.trainer_calls import forward, gradients, moved, train

CENTRED_NORMS = {"qwen3_5", "qwen3_5_moe"}
"""Families whose norms multiply by one plus their weights."""
DOUBLES = Path(__file__).parents[2] / "doubles" / "gpu_libraries"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """The stand-ins can be imported, and are forgotten afterwards."""
    monkeypatch.setenv("UNSLOTH_COMPILE_DISABLE", "0")
    monkeypatch.syspath_prepend(str(DOUBLES))
    yield
    for name in ("unsloth", "liger_kernel", "liger_kernel.transformers"):
        sys.modules.pop(name, None)


def configured(family: str, folder: Path) -> TrainerConfig:
    return TrainerConfig(model_path=BUILDERS[family](folder / family), lora_rank=4, lora_alpha=8)


def step_of(config: TrainerConfig, datums: Sequence[Datum]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities after a step, and the gradients of the next one."""
    trainer = moved(Trainer(config), datums)
    rows = forward(trainer, datums)
    train(trainer, datums)
    return rows, gradients(trainer)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_a_model_from_unsloth_is_trained_like_one_from_transformers(family: str, tmp_path: Path) -> None:
    config, datums = configured(family, tmp_path), make_datums(family)

    rows, steps = step_of(chz.replace(config, loader="unsloth"), datums)

    expected = step_of(config, datums)
    assert "unsloth" in sys.modules
    torch.testing.assert_close(rows, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(steps, expected[1], rtol=0, atol=0)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("family", sorted(BUILDERS.keys() - CENTRED_NORMS))
def test_liger_layers_stand_where_those_of_the_model_stood(family: str, tmp_path: Path) -> None:
    config, datums = configured(family, tmp_path), make_datums(family)
    liger: Any = import_module("liger_kernel.transformers")

    rows, steps = step_of(chz.replace(config, kernels="liger"), datums)

    assert liger.LigerRMSNorm.num_calls > 0
    assert (liger.LigerSwiGLUMLP.num_calls > 0) == (family != "qwen3_vl_moe")  # its experts have no such module
    expected = step_of(config, datums)
    torch.testing.assert_close(rows, expected[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(steps, expected[1], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("family", sorted(CENTRED_NORMS))
def test_norms_of_another_kind_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.kernels: expected a model with RMSNorm .* got {family}_text"):
        Trainer(chz.replace(configured(family, tmp_path), kernels="liger"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_joins_packed_sequences_is_refused(attention: str, tmp_path: Path) -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(
        BUILDERS["qwen3_vl"](tmp_path / "model"), attn_implementation=attention
    )
    with pytest.raises(ConfigError, match=r"trainer\.loader: expected attention that keeps the sequences"):
        require_separate_sequences(model.model.language_model)
    model.set_attn_implementation({"text_config": PACKED_ATTENTION, "vision_config": "sdpa"})

    require_separate_sequences(model.model.language_model)


def test_unsloth_does_not_shard(tmp_path: Path) -> None:
    config = chz.replace(configured("qwen3_vl", tmp_path), loader="unsloth", sharding="offload")

    with pytest.raises(ConfigError, match=r"expected 'none' with trainer\.loader=unsloth"):
        Trainer(config)


def test_missing_packages_and_gpus_are_told_apart(libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    require_libraries("unsloth", "liger", has_gpu=True)
    with pytest.raises(
        ConfigError, match=r"trainer\.loader=unsloth: expected a GPU, got none; .* or set trainer\.loader"
    ):
        require_libraries("unsloth", "torch", has_gpu=False)
    with pytest.raises(
        ConfigError, match=r"trainer\.kernels=liger: expected a GPU, got none; .* or set trainer\.kernels"
    ):
        require_libraries("hf", "liger", has_gpu=False)

    monkeypatch.undo()

    require_libraries("hf", "torch", has_gpu=False)
    with pytest.raises(ConfigError, match=r"expected the package unsloth, got none; install it where the trainer runs"):
        require_libraries("unsloth", "torch", has_gpu=True)


async def test_a_trainer_without_the_library_refuses_before_it_loads_a_model(tmp_path: Path) -> None:
    config = TrainerConfig(model_path=tmp_path / "there is no model", loader="unsloth")

    with pytest.raises(ConfigError, match=r"trainer\.loader=unsloth: expected the package unsloth, got none"):
        async with TrainingClient(config, tmp_path / "trainer.log"):
            pass


@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("liger_kernel") is None, reason="no GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_liger_kernels_give_the_results_of_the_stock_layers(dtype: Any, tmp_path: Path) -> None:
    config, datums = chz.replace(configured("qwen3_vl", tmp_path), dtype=dtype), make_datums("qwen3_vl")

    rows, steps = step_of(chz.replace(config, kernels="liger"), datums)

    expected = step_of(config, datums)
    limit = 1e-5 if dtype == "float32" else 2e-2
    for one, other in zip((*rows, *steps), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=limit * max(1.0, float(other.abs().max())))
