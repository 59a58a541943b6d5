"""What the trainer computes for a model of every family, against Transformers and peft."""

from pathlib import Path

import chz
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.renderers.families import FAMILIES, LoraModule
from cua_rl.training import wire
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.training.layers import ATTENTION_KERNELS
from cua_rl.training.model_files import merge_adapter
from cua_rl.training.trainer import Trainer
from cua_rl.types.rollout import Datum
from tests.real.training.test_exactness import load_stock, stock_logprobs, stock_rows_and_gradients
from tests.real.training.test_ranks import PLAIN_STEP
from tests.real.training.tiny_families import BUILDERS, make_datums
from tests.real.training.trainer_calls import LOSS, forward, gradients, moved, train
from tests.rounding import KeepFloat64, assert_as_exact_as


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def family_config(family: str, tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    folder = BUILDERS[family](tmp_path_factory.mktemp("models") / family)
    return TrainerConfig(model_path=folder, lora_rank=4, lora_alpha=8)


@pytest.fixture
def family_datums(family: str) -> list[Datum]:
    return make_datums(family)


@pytest.mark.parametrize("modules", [("language",), ("language", "merger", "vision")], ids=["language", "everywhere"])
def test_logprobs_and_gradients_are_as_exact_as_those_of_peft_on_the_stock_model(
    family_config: TrainerConfig, family_datums: list[Datum], tmp_path: Path, modules: tuple[LoraModule, ...]
) -> None:
    path, datums = family_config.model_path, family_datums
    trainer = moved(Trainer(chz.replace(family_config, lora_rank=4, lora_alpha=8, lora_modules=modules)), datums)
    trainer.save_weights_for_sampler(tmp_path / "adapter")
    stock, exact = (
        PeftModel.from_pretrained(load_stock(path, dtype), tmp_path / "adapter", is_trainable=True)
        for dtype in (torch.float32, torch.float64)
    )
    exact.double()

    rows, expected = forward(trainer, datums), stock_rows_and_gradients(stock, path, datums)
    train(trainer, datums)
    with KeepFloat64():
        truth = stock_rows_and_gradients(exact, path, datums)

    assert_as_exact_as(rows, expected[0], truth[0])
    assert max(gradient.abs().max() for gradient in truth[1]) > 0.1
    assert_as_exact_as(gradients(trainer), expected[1], truth[1])


def test_packed_rows_equal_single_sequences(family_config: TrainerConfig, family_datums: list[Datum]) -> None:
    trainer = moved(Trainer(family_config), family_datums)

    together = forward(trainer, family_datums)
    alone = [forward(trainer, [datum])[0] for datum in family_datums]

    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_that_is_kept_changes_no_gradient(
    dtype: str, family_config: TrainerConfig, family_datums: list[Datum]
) -> None:
    found: list[list[Tensor]] = []
    for keeps_attention in (False, True):
        config = chz.replace(family_config, dtype=dtype, gradient_checkpointing=True, keeps_attention=keeps_attention)
        trainer = moved(Trainer(config), family_datums)
        train(trainer, family_datums)
        found.append(gradients(trainer))

    assert all(one.equal(other) for one, other in zip(*found, strict=True))


class AttentionLayouts(TorchDispatchMode):
    """Whether tokens follow each other in memory, as PyTorch's cuDNN wants them, in every call without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.are_tokens_outside: list[bool] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Tensor, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func in ATTENTION_KERNELS and (kwargs or {}).get("attn_mask") is None:
            self.are_tokens_outside.append(all(heads.transpose(1, 2).is_contiguous() for heads in args[:3]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_attention_gets_its_heads_in_the_layout_for_which_cudnn_needs_no_plan_per_length(
    dtype: str, family: str, family_config: TrainerConfig, family_datums: list[Datum]
) -> None:
    trainer = Trainer(chz.replace(family_config, dtype=dtype))
    forward(trainer, family_datums)  # from here on, the vision tower has nothing to do

    with AttentionLayouts() as found:
        forward(trainer, family_datums)

    assert found.are_tokens_outside or family.startswith("qwen3_5")  # whose tiny models have it in the last layer only
    assert all(found.are_tokens_outside)
    assert trainer.model.attention_kernel == "ScaledDotProductFlashAttentionForCpu"


def test_half_precision_is_close_to_single(family_config: TrainerConfig, family_datums: list[Datum]) -> None:
    """Half of the tokens at least: one near the border between two experts may visit another one."""
    expected = forward(Trainer(family_config), family_datums)
    trainer = Trainer(chz.replace(family_config, dtype="bfloat16", gradient_checkpointing=True))

    rows = forward(trainer, family_datums)
    train(trainer, family_datums)

    differences = torch.cat([(one - other)[other != 0] for one, other in zip(rows, expected, strict=True)]).abs()
    assert differences.median() < 0.1
    assert all(gradient.isfinite().all() for gradient in gradients(trainer))


def test_screenshots_matter_to_the_answer(family: str, family_config: TrainerConfig) -> None:
    """Or the comparisons above would pass without a vision tower."""
    shown, blank = make_datums(family), make_datums(family)
    trainer = Trainer(family_config)
    torch.nn.init.zeros_(trainer.model.base.model.visual.patch_embed.proj.weight)
    unseen = forward(trainer, blank)
    seen = forward(Trainer(family_config), shown)
    assert (seen[0] - unseen[0]).abs().max() > 0.01


def test_adapters_change_the_layers_that_the_family_names(
    family: str, family_config: TrainerConfig, tmp_path: Path
) -> None:
    Trainer(family_config).save_weights_for_sampler(tmp_path / "adapter")

    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    layers = {name.split(".layers.")[1].split(".", 1)[1].partition(".lora_")[0] for name in names}

    attention = {f"self_attn.{letter}_proj" for letter in "qkvo"}
    dense = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    linear = {f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")}
    expected = {"qwen3_vl_moe": attention, "qwen3_5": attention | dense | linear, "qwen3_5_moe": attention | linear}
    assert layers == expected.get(family, attention | dense)
    assert all("language_model.layers." in name for name in names)


def test_adapters_on_merger_and_vision_tower_reach_every_linear_layer_there(
    family_config: TrainerConfig, tmp_path: Path
) -> None:
    adapted = chz.replace(family_config, lora_rank=4, lora_alpha=8, lora_modules=("merger", "vision"))
    trainer = Trainer(adapted)
    trainer.save_weights_for_sampler(tmp_path / "adapter")

    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    found = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}
    stock = load_stock(family_config.model_path).named_modules()
    assert found == {name for name, module in stock if ".visual." in name and isinstance(module, torch.nn.Linear)}


def test_a_merged_model_computes_what_the_base_model_computes_with_the_adapter(
    family_config: TrainerConfig, family_datums: list[Datum], tmp_path: Path
) -> None:
    path = family_config.model_path
    moved(Trainer(family_config), family_datums).save_weights_for_sampler(tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    merge_adapter(path, tmp_path / "adapter", tmp_path / "merged", "auto")

    alone = load_stock(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(load_stock(path), tmp_path / "adapter")
    with torch.no_grad():
        for datum in family_datums:
            one, other = (stock_logprobs(model, path, datum) for model in (alone, adapted))
            assert (one - other).abs().max() < 1e-4


async def test_two_processes_that_hold_half_of_the_layers_compute_what_one_does(
    family_config: TrainerConfig, family_datums: list[Datum], tmp_path: Path
) -> None:
    alone = Trainer(family_config)
    expected = train(alone, family_datums)
    sharded = chz.replace(family_config, num_processes=2, sharding="full")

    async with TrainingClient(sharded, tmp_path / "trainer.log") as two:
        output = await two.forward_backward(family_datums, LOSS)
        await two.optim_step(PLAIN_STEP)
        await two.save_weights_for_sampler(tmp_path / "two")

    alone.optim_step(wire.OptimStep(optim=PLAIN_STEP))
    alone.save_weights_for_sampler(tmp_path / "one")
    for row, other in zip(output.training_logprobs, expected.training_logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(row), torch.tensor(other), atol=1e-5, rtol=0)
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=1e-4, rtol=0)


def test_everything_can_be_trained_too(
    family: str, family_config: TrainerConfig, family_datums: list[Datum], tmp_path: Path
) -> None:
    whole = TrainerConfig(model_path=family_config.model_path, lora_rank=0)
    trainer = moved(Trainer(whole), family_datums)
    trainer.save_weights_for_sampler(tmp_path / "model")

    again = Trainer(TrainerConfig(model_path=tmp_path / "model", lora_rank=0))
    for one, other in zip(forward(trainer, family_datums), forward(again, family_datums), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_work_is_counted_by_the_shapes_of_the_model(
    family: str, family_config: TrainerConfig, family_datums: list[Datum]
) -> None:
    trainer = Trainer(family_config)
    train(trainer, family_datums)
    account = trainer.account.take()
    assert account["trainer/tokens"] == sum(datum.model_input.length for datum in family_datums)
    # three layers; attention 64 x 64 twice, 64 x 32 twice, and the MLP: 3 maps of 64 x 128, or two experts' of 64 x 48
    # with a router of 64 x 8; of the last layer, only the maps to keys and values count for every token
    mlp = 2 * 3 * 64 * 48 + 64 * 8 if family.endswith("_moe") else 3 * 64 * 128
    attention = 2 * 64 * 64 + 2 * 64 * 32
    if family == "qwen3_5_moe":  # and an expert for every token, with its gate
        mlp += 3 * 64 * 32 + 64
    if family.startswith(
        "qwen3_5"
    ):  # linear: queries, keys, values (128), gates and outputs (64), two of 4, a convolution of 4
        attention = 64 * 128 + 2 * 64 * 64 + 2 * 64 * 4 + 4 * 128
    assert trainer.account.shape.language == 2 * (attention + mlp) + 2 * 64 * 32
    assert trainer.account.shape.language_attention == 2 * 64


@pytest.mark.parametrize("linear", ["qwen3_5", "qwen3_5_moe"])
def test_the_memory_plan_counts_the_weights_and_adapters_of_linear_attention(tmp_path: Path, linear: str) -> None:
    path = BUILDERS[linear](tmp_path / "model")
    sizes, model = load_model_sizes(path), Trainer(TrainerConfig(model_path=path, lora_rank=4)).model
    adapters = sum(parameter.numel() for parameter in model.trainable_parameters)
    assert sizes.lora_parameters(4) == adapters
    assert sizes.parameters == sum(parameter.numel() for parameter in model.base.parameters()) - adapters
    assert sizes.kv_bytes_per_token(1) == 2 * 1 * 2 * 16 * 2  # of one layer of three: keys and values, two heads of 16
