# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Optional libraries of the trainer: refused where they cannot work, and without effect on what is computed."""

import sys
from collections.abc import Generator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import chz
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForImageTextToText

from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.training.layers import PACKED_ATTENTION, require_separate_sequences
from cua_rl.training.libraries import require_libraries
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Datum
from tests.real.training.tiny_families import BUILDERS, make_datums
from tests.real.training.trainer_calls import forward, gradients, moved, train

DOUBLES = Path(__file__).parents[2] / "doubles" / "gpu_libraries"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """The stand-in can be imported, and is forgotten afterwards."""
    monkeypatch.setenv("UNSLOTH_COMPILE_DISABLE", "0")
    monkeypatch.syspath_prepend(str(DOUBLES))
    yield
    sys.modules.pop("unsloth", None)


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


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])  # a norm of each kind
def test_compiled_layers_give_the_results_of_the_stock_layers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, datums = configured(family, tmp_path), make_datums(family)
    config = chz.replace(config, gradient_checkpointing=True, keeps_attention=True)
    expected = step_of(config, datums)
    layers: Any = import_module(f"transformers.models.{family}.modeling_{family}")
    monkeypatch.setattr(layers, "apply_rotary_pos_emb", layers.apply_rotary_pos_emb)  # for other tests afterwards
    frames = counters["frames"].copy()

    rows, steps = step_of(chz.replace(config, kernels="compiled"), datums)

    # norms over rows and over heads, the rotation, SwiGLU; with gradients and without
    compiled = counters["frames"] - frames
    assert compiled["ok"] == compiled["total"] >= 6
    # numbers of about 1, rounded to 24 bits; errors of one layer pass through all of them
    for one, other in zip((*rows, *steps), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2**13 * 2.0**-24 * max(1.0, float(other.abs().max())))


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

    with pytest.raises(ConfigError, match=r"expected 'replicated' with trainer\.loader=unsloth"):
        Trainer(config)


def test_missing_packages_and_gpus_are_told_apart(libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    require_libraries("unsloth", "torch", has_gpu=True)
    with pytest.raises(
        ConfigError, match=r"trainer\.loader=unsloth: expected a GPU, got none; .* or set trainer\.loader"
    ):
        require_libraries("unsloth", "torch", has_gpu=False)

    monkeypatch.undo()

    require_libraries("hf", "torch", has_gpu=False)
    with pytest.raises(ConfigError, match=r"expected the package unsloth, got none; install it where the trainer runs"):
        require_libraries("unsloth", "torch", has_gpu=True)


@pytest.mark.parametrize(("has_gpu", "compilers"), [(True, "gcc and clang"), (False, r"g\+\+ and clang\+\+")])
def test_layers_are_compiled_where_there_is_a_compiler(
    has_gpu: bool, compilers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_libraries("hf", "compiled", has_gpu=has_gpu)

    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match=rf"expected a compiler .* got none of {compilers}; install one"):
        require_libraries("hf", "compiled", has_gpu=has_gpu)


async def test_a_trainer_without_the_library_refuses_before_it_loads_a_model(tmp_path: Path) -> None:
    config = TrainerConfig(model_path=tmp_path / "there is no model", loader="unsloth")

    with pytest.raises(ConfigError, match=r"trainer\.loader=unsloth: expected the package unsloth, got none"):
        async with TrainingClient(config, tmp_path / "trainer.log"):
            pass
