"""What fits where, against measured peaks, and that what does not fit is refused with a setting that does."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cua_rl.command_line.fields import with_values
from cua_rl.machine.machine import Machine, find_machine
from cua_rl.machine.memory_parts import GIB, Request, outside_bytes, usable_bytes
from cua_rl.machine.memory_plan import MemoryBudget, plan_memory
from cua_rl.machine.model_sizes import BYTES_16, BYTES_32, LinearSizes, load_model_sizes
from cua_rl.machine.prefix_cache import RolloutShape, simulate_prefix_cache
from cua_rl.machine.presets import MACHINE_PRESETS, PresetName
from cua_rl.models import LADDER_QWEN3_VL, TINY_QWEN3_VL
from cua_rl.renderers.families import FAMILIES
from cua_rl.run.preflight import rollout_shape
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.model_folder import find_model
from cua_rl.sampling.config import ServerConfig
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError
from tests.machine.simulated_gpu import least_free_share_of_a_day

MODELS = Path(__file__).parent / "model_configs"
PEAKS, PRESET_PEAKS = (
    [json.loads(line) for line in (Path(__file__).parent / f"{name}_peaks.jsonl").read_text().splitlines()]
    for name in ("trainer", "preset")
)
"""As benchmarks/trainer_peaks.py printed them."""


def request(
    size: str,
    machine: str,
    *,
    context: int = 16384,
    rank: int = 32,
    image_tokens: int = 16384,
    server: ServerConfig | None = None,
    trainer: TrainerConfig | None = None,
) -> Request:
    return Request(
        model=load_model_sizes(MODELS / f"Qwen3-VL-{size}-Instruct"),
        machine=find_machine(machine, {}, is_dry_run=True),
        server=server or ServerConfig(),
        trainer=with_values(trainer or TrainerConfig(), lora_rank=rank),
        context_tokens=context,
        largest_image_tokens=image_tokens,
    )


@pytest.mark.parametrize(("is_float32", "copies"), [(False, 1), (True, 4 * 2)])
def test_processes_share_one_copy_of_the_checkpoint_in_its_own_precision(is_float32: bool, copies: int) -> None:
    dtype = "float32" if is_float32 else "bfloat16"
    wanted = request("4B", "8x80", trainer=TrainerConfig(gpus=(4, 5, 6, 7), dtype=dtype))

    plan = plan_memory(wanted)

    assert plan.host["loading"] == copies * BYTES_16 * wanted.model.parameters


def test_processes_that_share_each_row_hold_a_longer_context() -> None:
    def plan(num_sharing: int) -> MemoryBudget:
        trainer = TrainerConfig(context_parallel=num_sharing, sharding="full", gradient_checkpointing=True)
        return plan_memory(request("8B", "8x80", context=262_144, trainer=trainer))

    with pytest.raises(ConfigError, match="memory: expected a trainer of"):
        plan(1)
    assert plan(4).trainer["activations"] < 40 * GIB


def total_gib(plan: MemoryBudget, kind: str) -> float:
    return sum({"trainer": plan.trainer, "server": plan.server}[kind].values()) / GIB


@pytest.mark.parametrize("peak", PEAKS, ids=["-".join(str(value) for value in list(one.values())[:5]) for one in PEAKS])
def test_weights_adapter_and_peak_are_those_of_the_trainer(peak: dict[str, float]) -> None:
    model = load_model_sizes(MODELS / str(peak["model"]))
    rank, num_tokens = int(peak["lora_rank"]), int(peak["num_tokens"])

    weights, adapter = BYTES_16 * model.parameters, BYTES_32 * model.lora_parameters(rank)
    activations = model.activation_bytes(num_tokens, rank, recomputes=bool(peak["recomputes"]))
    if peak["keeps_attention"]:
        activations += model.attention_bytes(num_tokens)

    assert weights / GIB == pytest.approx(peak["weights_gib"], abs=0.001)
    assert adapter / GIB == pytest.approx(peak["adapter_gib"], abs=0.001)
    # the adapter, its two moments, and copies of it for autocast: while activations are recomputed, those of one layer
    held = weights + (3.0 if peak["recomputes"] else 3.5) * adapter
    assert activations / GIB == pytest.approx(peak["peak_gib"] - held / GIB, rel=0.1)


def test_the_measured_peaks_cover_what_the_plan_is_for() -> None:
    covered = {(one["model"], one["num_tokens"], one["recomputes"]) for one in PEAKS}

    assert {model for model, _, _ in covered} == {model.name for model in MODELS.iterdir()}
    families = {json.loads((model / "config.json").read_text())["model_type"] for model in MODELS.iterdir()}
    assert families == FAMILIES.keys()
    assert covered >= {
        (model.name, tokens, recomputes)
        for model in MODELS.iterdir()
        for tokens in ((4096, 8192, 16384, 32768) if model.name.startswith("Qwen3-VL") else (4096,))
        for recomputes in (False, True)
    }


def test_a_model_that_nearly_fills_a_gpu_is_trained_with_recomputation() -> None:
    plan = plan_memory(request("4B", "1x80"))

    # 8.3 GiB of weights, 36 layers of one vector a token, one layer in full: 96 GiB without
    assert plan.gradient_checkpointing
    assert total_gib(plan, "trainer") == pytest.approx(16.3, abs=0.2)
    # of 79.2 GiB that CUDA counts, 4 % stay free: 79.2 - 3.2 - 16.3 and the server's context of 0.7 leave 59.0
    assert total_gib(plan, "trainer") + total_gib(plan, "server") <= 0.96 * 79.2
    assert plan.gpus.gpu_memory_utilization == pytest.approx(0.74)
    # the rest without its own context: 79.2 * (1 - 0.04 - 0.74) - 2 * 0.7 = 16.0
    assert plan.trainer_fraction * 79.15 == pytest.approx(16.0, abs=0.1)


def test_a_trainer_with_gpus_of_its_own_keeps_the_results_of_attention_if_they_fit() -> None:
    model = load_model_sizes(MODELS / "Qwen3-VL-4B-Instruct")
    alone, shared = plan_memory(request("4B", "2x80")), plan_memory(request("4B", "1x80"))
    crowded = plan_memory(request("4B", "2x24", context=20480))

    # 35 layers of 32 heads of 128 in bfloat16, and a float32 for each head: 16,384 * 35 * (8192 + 128) bytes
    assert alone.trainer["kept attention"] == 1.05 * 16384 * 35 * 8320 == 1.05 * model.attention_bytes(16384)
    assert (alone.gradient_checkpointing, alone.keeps_attention) == (True, True)
    assert "kept attention 4.7" in alone.table()
    # beside a server, the KV cache gets the memory; for 20,480 tokens, 17.8 GiB and 5.8 are more than 96 % of 23.4
    assert (shared.gradient_checkpointing, shared.keeps_attention) == (True, False)
    assert (crowded.gradient_checkpointing, crowded.keeps_attention, crowded.sharding) == (True, False, "replicated")


def test_the_feature_cache_holds_a_steps_screenshots_if_main_memory_has_room() -> None:
    def vision_cache(machine: str | None, host_gib: float | None, **changes: object) -> float:
        base = request("4B", machine or "1x80")
        there = (
            replace(base.machine, host_gib=host_gib) if machine else Machine(gpus=(), gpu_gib=None, host_gib=host_gib)
        )
        asked = replace(base, machine=there)
        trainer = with_values(asked.trainer, **changes)
        return plan_memory(replace(asked, trainer=trainer, num_trained=32, num_rollouts=1)).vision_cache_gib

    # four levels of 2560 numbers in bfloat16 for each of 32 * 16,384 tokens: 20,480 bytes, 10 GiB together
    assert vision_cache("2x80", 512.0) == 10.0
    assert vision_cache("3x80", 512.0) == 5.0  # of two trainer processes, each has half of the rollouts
    # weights 8.3 while they load, trainer 2, server 4 and images 1 leave 14.7 of 32 beside the 2: a quarter is 3.7
    assert vision_cache("2x80", 32.0) == pytest.approx(5.7, abs=0.05)
    assert vision_cache("2x80", None) == vision_cache("2x80", 8.5) == vision_cache(None, 512.0) == 2.0
    assert vision_cache("2x80", 512.0, lora_modules=("vision",)) == 2.0
    assert vision_cache("2x80", 512.0, vision_cache_gib=0.5) == 0.5


def test_a_small_model_keeps_its_activations() -> None:
    assert not plan_memory(request("2B", "2x80")).gradient_checkpointing


def test_a_model_larger_than_a_gpu_is_split_on_both_sides() -> None:
    plan = plan_memory(request("32B", "4x80"))

    assert (plan.sharding, plan.gpus.tensor_parallel, len(plan.gpus.server_copies)) == ("full", 2, 1)


@pytest.mark.parametrize(
    ("size", "machine", "context", "copies"),
    [("8B", "8x80", 16384, 4), ("30B-A3B", "8x80", 32768, 4), ("2B", "8x24", 65536, 4), ("32B", "8x48", 16384, 2)],
)
def test_a_model_is_split_over_no_more_gpus_than_hold_it_and_one_context(
    size: str, machine: str, context: int, copies: int
) -> None:
    plan = plan_memory(request(size, machine, context=context))

    assert (plan.gpus.tensor_parallel, len(plan.gpus.server_copies)) == (4 // copies, copies)


def test_4b_trains_on_one_gpu_of_24_gb_beside_its_server() -> None:
    # 22.5 GiB is what the driver reports for an L4 or A10G
    plan = plan_memory(request("4B", "1x22.5", context=8192, image_tokens=2048))

    assert plan.sharding == "offload"
    assert plan.server["KV cache"] > 2 * 8192 * plan_kv_bytes("4B")
    assert total_gib(plan, "trainer") + total_gib(plan, "server") <= 22.5


def plan_kv_bytes(size: str) -> int:
    return load_model_sizes(MODELS / f"Qwen3-VL-{size}-Instruct").kv_bytes_per_token(1)


def test_the_image_cache_holds_the_screenshots_of_all_rollouts() -> None:
    def image_cache_gib(machine: str, host_gib: float | None = None) -> float:
        wanted = request("4B", machine, context=32768)
        there = replace(wanted.machine, host_gib=host_gib)
        return plan_memory(replace(wanted, num_rollouts=64, machine=there)).image_cache_gib

    # 64 prompts of 32,768 tokens; a token is 2 x 2 patches of 16 x 16 pixels, 3 channels and 2 frames: 6,144 bytes
    assert image_cache_gib("1x80") == pytest.approx(12.0)
    assert image_cache_gib("8x80") == pytest.approx(12.0 / 4)  # four copies of the server's model
    # beside them, loading takes 8.3 GiB, the vision cache 2, the trainer 2 and the server 4; half of the rest
    assert image_cache_gib("1x80", host_gib=32.0) == pytest.approx((32 - 16.3) / 2, abs=0.1)
    assert image_cache_gib("1x80", host_gib=16.0) == 1.0  # a prompt takes 0.19


def supervised(size: str, machine: str, rank: int) -> Request:
    return replace(request(size, machine, rank=rank, context=8192), has_server=False)


def test_supervised_runs_are_planned_without_a_server() -> None:
    whole, sharded = plan_memory(supervised("4B", "1x80", 32)), plan_memory(supervised("32B", "4x40", 32))

    assert (whole.server, whole.sharding, whole.gpus.num_trainer_processes) == ({}, "replicated", 1)
    assert (sharded.server, sharded.sharding, sharded.gpus.num_trainer_processes) == ({}, "full", 4)


def test_training_all_weights_takes_four_float32_numbers_of_each() -> None:
    parameters = load_model_sizes(MODELS / "Qwen3-VL-2B-Instruct").parameters

    plan = plan_memory(supervised("2B", "1x80", 0))

    assert plan.trainer["weights"] == 4 * parameters
    assert plan.trainer["gradients and optimizer"] == 12 * parameters  # gradient, two moments


def test_training_all_weights_of_4b_on_eight_gpus_shares_out_weights_gradients_and_moments() -> None:
    model = load_model_sizes(MODELS / "Qwen3-VL-4B-Instruct")
    whole = model.embedding_parameters  # on every GPU
    held = (model.decoder_parameters + model.vision_parameters) // 8 + whole

    plan = plan_memory(supervised("4B", "8x80", 0))

    assert plan.sharding == "full"
    assert plan.trainer["weights"] == 4 * held
    assert plan.trainer["gradients and optimizer"] == 12 * held + 4 * whole  # one message has the whole ones
    assert plan.trainer["weights for autocast"] == 2 * whole
    # of two layers: in bfloat16, the gradients in bfloat16, and these in float32
    kept = model.activation_bytes(plan.micro_batch_tokens, 0, recomputes=plan.gradient_checkpointing)
    in_use = 8 * 2 * model.layer_parameters
    assert plan.trainer["activations"] == pytest.approx(1.05 * (kept + in_use))
    assert plan.host["loading"] == 2 * model.parameters  # the checkpoint, once
    with pytest.raises(ConfigError, match=r"memory: expected a trainer of at least \d\d\.\d GiB per GPU, to fit"):
        plan_memory(supervised("4B", "1x80", 0))


def test_settings_by_hand_are_kept() -> None:
    trainer = TrainerConfig(gradient_checkpointing=True, micro_batch_tokens=20000, sharding="full")
    server = ServerConfig(gpu_memory_utilization=0.6, tensor_parallel=2, max_num_seqs=7)

    plan = plan_memory(request("2B", "4x80", server=server, trainer=trainer))

    assert (plan.gradient_checkpointing, plan.micro_batch_tokens, plan.sharding) == (True, 20000, "full")
    assert (plan.max_num_seqs, plan.gpus.gpu_memory_utilization, plan.gpus.tensor_parallel) == (7, 0.6, 2)


def test_shorter_rows_by_hand_are_kept_beside_sequences_that_are_longer() -> None:
    plan = plan_memory(request("4B", "1x80", trainer=TrainerConfig(micro_batch_tokens=1024)))

    assert plan.micro_batch_tokens == 1024
    # the longest sequence gets a row of its own, of 16,384 tokens
    assert plan.trainer["activations"] == plan_memory(request("4B", "1x80")).trainer["activations"]


def test_a_server_in_float32_takes_twice_the_memory() -> None:
    wanted = request("2B", "2x80")
    exact = replace(wanted, server=ServerConfig(dtype="float32"))

    half, whole = plan_memory(wanted), plan_memory(exact)

    assert [whole.server[part] / half.server[part] for part in ("weights", "adapters")] == [2, 2]
    assert whole.max_num_seqs < half.max_num_seqs


def test_adapter_slots_have_the_ranks_that_vllm_knows() -> None:
    odd, even = (plan_memory(request("4B", "2x80", rank=rank)).server["adapters"] for rank in (33, 64))

    assert odd == even


def test_training_all_weights_under_autocast_takes_a_copy_of_them() -> None:
    half = supervised("2B", "1x80", 0)
    exact = replace(half, trainer=with_values(half.trainer, dtype="float32"))

    assert plan_memory(half).trainer["weights for autocast"] == 2 * half.model.parameters
    assert "weights for autocast" not in plan_memory(exact).trainer


def test_data_is_not_asked_to_be_shorter() -> None:
    refused = supervised("8B", "1x10.8", 32)
    of_data = replace(refused, is_context_fixed=True)

    with pytest.raises(ConfigError, match=r"server\.max_model_len="):
        plan_memory(refused)
    with pytest.raises(ConfigError) as error:
        plan_memory(of_data)
    assert "max_model_len" not in str(error.value)


def test_keys_and_values_are_split_by_whole_heads() -> None:
    seven = ServerConfig(gpus=tuple(range(7)), tensor_parallel=7)
    wanted = request("8B", "8x80", server=seven, trainer=TrainerConfig(gpus=(7,)))
    wanted = replace(wanted, model=replace(wanted.model, num_heads=28, num_kv_heads=4))

    with pytest.raises(
        ConfigError, match=r"server\.tensor_parallel: expected a divisor or a multiple of the model's 4"
    ):
        plan_memory(wanted)


# as of Qwen3.5 9B: 24 of 32 layers, 16 key heads and 32 value heads of 128
LINEAR = LinearSizes(
    num_layers=24, key=2048, key_head_dim=128, value=4096, num_value_heads=32, value_head_dim=128, convolution=4
)


def test_linear_attention_keeps_two_states_of_every_sequence() -> None:
    wanted = request("8B", "2x48", context=16384)
    hybrid = replace(wanted, model=replace(wanted.model, num_layers=32, num_kv_heads=4, head_dim=256, linear=LINEAR))
    # 32 heads of 128 x 128 numbers in float32, and three tokens of 8,192 numbers in bfloat16
    assert LINEAR.state_bytes == 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)

    plan = plan_memory(hybrid)

    half_a_context = 8192 * 8 * 2 * 4 * 256 * 2
    assert plan.max_num_seqs == int(plan.server["KV cache"] / (half_a_context + 2 * LINEAR.state_bytes)) < 128


def test_shards_of_linear_attention_add_up_to_the_model() -> None:
    wanted = request("8B", "4x48", trainer=TrainerConfig(sharding="full"))
    model = replace(wanted.model, linear=LINEAR)

    plan = plan_memory(replace(wanted, model=model))

    beside = 2 * model.layer_parameters + model.embedding_parameters
    assert plan.gpus.num_trainer_processes == 2
    assert plan.trainer["weights"] == 2 * (beside + (model.parameters - model.embedding_parameters) // 2)


BY_HAND = TrainerConfig(gradient_checkpointing=False)
IMPOSSIBLE = [
    request("2B", "1x8"),
    request("2B", "1x12"),
    request("4B", "1x16"),
    request("4B", "1x24"),
    request("4B", "1x24", context=32768),
    request("4B", "1x80", trainer=BY_HAND),
    request("4B", "2x80", trainer=BY_HAND),
    request("4B", "1x80", trainer=TrainerConfig(micro_batch_tokens=200_000)),
    request("4B", "1x80", server=ServerConfig(gpu_memory_utilization=0.95)),
    request("4B", "1x80", server=ServerConfig(gpu_memory_utilization=0.1)),
    request("8B", "1x24"),
    request("8B", "1x32"),
    request("8B", "2x24"),
    request("8B", "1x80", context=131072),
    request("32B", "1x80"),
    request("32B", "2x80"),
    request("32B", "4x40"),
    request("32B", "4x80", trainer=TrainerConfig(sharding="replicated")),
    request("32B", "4x80", server=ServerConfig(tensor_parallel=1)),
    request("32B", "4x80", context=65536),
    request("30B-A3B", "1x80"),
    request("30B-A3B", "2x48"),
]


def test_twenty_impossible_plans_are_refused_in_seconds_with_settings_that_fit() -> None:
    started = time.process_time()

    for impossible in IMPOSSIBLE:
        with pytest.raises(ConfigError, match=r"memory: expected .* got ") as refused:
            plan_memory(impossible)

        remedies = re.split(", or with ", str(refused.value).partition("it fits with ")[2])
        assert remedies != [""], refused.value
        for remedy in remedies:
            plan_memory(after(remedy, impossible))

    assert len(IMPOSSIBLE) >= 20
    assert time.process_time() - started < 5


@pytest.mark.parametrize(("tensor_parallel", "num_processes"), [(8, None), (None, 8)])
def test_a_setting_that_rules_out_a_remedy_is_not_refused_in_its_place(
    tensor_parallel: int | None, num_processes: int | None
) -> None:
    everything = tuple(range(8))
    # without GPUs by hand, server and trainer would have 4 each, which is too few for 8
    server = ServerConfig(gpus=everything, tensor_parallel=tensor_parallel)
    trainer = TrainerConfig(gpus=everything, num_processes=num_processes)

    with pytest.raises(ConfigError, match=r"memory: expected .* got 8 GPUs of 80\.0 GiB"):
        plan_memory(request("32B", "8x80", context=262_144, server=server, trainer=trainer))


def after(remedy: str, refused: Request) -> Request:
    """The request with what the message proposes."""
    if found := re.fullmatch(r"server\.max_model_len=(\d+)", remedy):
        return replace(refused, context_tokens=int(found[1]))
    if found := re.fullmatch(r"(\d+) GPUs", remedy):
        gpus = tuple(str(index) for index in range(int(found[1])))
        return replace(refused, machine=replace(refused.machine, gpus=gpus))
    if found := re.fullmatch(r"GPUs of (\d+) GiB", remedy):
        return replace(refused, machine=replace(refused.machine, gpu_gib=float(found[1])))
    group, _, name = remedy.removesuffix(" left out").partition(".")
    if group == "server":
        return replace(refused, server=with_values(refused.server, **{name: None}))
    return replace(refused, trainer=with_values(refused.trainer, **{name: None}))


def test_weights_that_main_memory_cannot_hold_are_refused() -> None:
    laptop = Machine(gpus=(), gpu_gib=None, host_gib=24.0)
    too_large, small = request("32B", "1x80"), request("2B", "1x80")

    with pytest.raises(ConfigError, match=r"expected .* GiB of main memory for the weights .*, got 24\.0"):
        plan_memory(replace(too_large, machine=laptop))
    assert plan_memory(replace(small, machine=laptop)).gradient_checkpointing


def test_pinned_matrices_take_powers_of_two_of_main_memory() -> None:
    wanted = request("4B", "1x22.5", context=8192, image_tokens=768)

    def plan(host_gib: float) -> MemoryBudget:
        return plan_memory(replace(wanted, machine=replace(wanted.machine, host_gib=host_gib)))

    # 2560 x 4096 and 2560 x 1024 numbers of 2 bytes take 1.6 times their size, 2560 x 9728 1.35 times
    exact = 2 * (2 * (4096 + 1024) * 2560 + 3 * 2560 * 9728)
    rounded = 2 * 2**25 + 2 * 2**23 + 3 * 2**26
    assert plan(24.0).host["weights"] == pytest.approx(2 * wanted.model.decoder_parameters * rounded / exact)
    # 9.6 GiB of them, vision cache 2, trainer 2, server 4, images 1
    with pytest.raises(ConfigError, match=r"of main memory for the weights .*, got 15\.0"):
        plan(15.0)


def test_the_demo_is_planned_as_ever_on_a_cpu() -> None:
    tiny = Request(
        model=load_model_sizes(TINY_QWEN3_VL),
        machine=Machine(gpus=(), gpu_gib=None, host_gib=8.0),
        server=ServerConfig(),
        trainer=TrainerConfig(lora_rank=16),
        context_tokens=2048,
        largest_image_tokens=16384,
    )

    plan = plan_memory(tiny)

    assert (plan.gradient_checkpointing, plan.micro_batch_tokens, plan.max_num_seqs) == (False, 16384, 128)
    assert sum(plan.host.values()) < 6 * GIB


def test_a_gpu_that_does_not_say_its_size_gets_frugal_settings() -> None:
    unknown = Machine(gpus=("0",), gpu_gib=None, host_gib=None)

    plan = plan_memory(replace(request("4B", "1x80"), machine=unknown))

    assert plan.gradient_checkpointing
    assert "1 GPU of unknown" in plan.table()


def test_the_table_adds_up() -> None:
    plan = plan_memory(request("8B", "4x80"))

    rows = re.findall(r": (\d+\.\d) = (.*)", plan.table())

    assert len(rows) == 3
    for total, parts in rows:
        assert sum(map(float, re.findall(r" (\d+\.\d)", f" {parts}"))) == pytest.approx(float(total), abs=0.3)


@pytest.mark.parametrize("text", ["80", "4 x 80", "x80", "0x80", "65x80"])
def test_a_machine_is_a_number_of_gpus_and_their_size(text: str) -> None:
    with pytest.raises(ConfigError, match="machine: expected the number of GPUs and the GiB of each, such as 4x80"):
        find_machine(text, {}, is_dry_run=True)
    assert find_machine("2x22.5", {}, is_dry_run=True) == Machine(gpus=("0", "1"), gpu_gib=22.5, host_gib=None)


_INSTRUCTIONS, _ANSWER = 1200, 200  # tokens of system prompt and tools, and of a thought and a call


@pytest.mark.parametrize("name", [name for name, preset in MACHINE_PRESETS.items() if preset.machine])
def test_a_preset_fits_its_machine_and_its_screens_fit_its_context(name: PresetName) -> None:
    preset = MACHINE_PRESETS[name]
    assert preset.machine is not None
    config = CLIConfig(preset=name)
    size = str(config.model_name).removeprefix("Qwen/Qwen3-VL-").removesuffix("-Instruct")
    context, pixels = config.server.max_model_len or 0, config.server.max_pixels or 0

    plan = plan_memory(request(size, preset.machine, context=context, image_tokens=pixels // 1024))

    is_full = config.agent.history is None
    num_screens = config.max_turns if is_full else config.agent.history_images
    needed = _INSTRUCTIONS + num_screens * (pixels // 1024 + 2) + config.max_turns * _ANSWER + config.max_tokens
    assert needed <= context
    assert plan.max_num_seqs >= 4


@pytest.mark.parametrize(
    ("name", "free"),
    [("24gb-4b", 0.052), ("h100-4b", 0.054), ("h100-8b", 0.054), ("4xh100-32b", 0.170), ("8xh100-30b-a3b", 0.067)],
)
def test_a_day_of_unequal_steps_and_restarts_leaves_three_percent_of_the_gpu_free(
    name: PresetName, free: float
) -> None:
    wanted = preset_request(name)
    plan = plan_memory(wanted)

    # a step every ten minutes
    found = least_free_share_of_a_day(wanted, plan, num_steps=144, seed=1)

    assert found == pytest.approx(free, abs=0.005)  # as docs/dev/gpus.md has it
    assert found >= 0.03
    server = outside_bytes(plan.gpus.tensor_parallel) / usable_bytes(wanted.machine.gpu_gib or 0.0)
    assert plan.gpus.gpu_memory_utilization + server <= 0.97


@pytest.mark.parametrize("name", [name for name, preset in MACHINE_PRESETS.items() if preset.machine])
def test_the_plan_of_a_preset_is_within_ten_percent_of_the_peak_of_its_own_row(name: PresetName) -> None:
    plan, model = preset_plan(name), str(CLIConfig(preset=name).model_name).partition("/")[2]
    row = {"model": model, "num_tokens": plan.micro_batch_tokens, "recomputes": True, "lora_rank": 32}
    row |= {"keeps_attention": plan.keeps_attention}
    if plan.sharding != "replicated":
        row |= {"sharding": plan.sharding, "num_processes": plan.gpus.num_trainer_processes}
    (found,) = [one for one in PRESET_PEAKS if row.items() <= one.items()]

    # in a step of several rows, the gradients of those before, too
    peak = found["peak_gib"] + found["adapter_gib"]

    assert plan.gradient_checkpointing
    assert 1 <= (sum(plan.trainer.values()) - plan.trainer["CUDA"]) / GIB / peak <= 1.1


def preset_request(name: PresetName, num_rollouts: int = 0) -> Request:
    """A preset on its machine, with prompts as long as its settings allow."""
    preset, config = MACHINE_PRESETS[name], CLIConfig(preset=name)
    size = str(config.model_name).removeprefix("Qwen/Qwen3-VL-").removesuffix("-Instruct")
    context, image_tokens = config.server.max_model_len or 0, (config.server.max_pixels or 0) // 1024
    server = ServerConfig(tensor_parallel=config.server.tensor_parallel)
    wanted = request(size, str(preset.machine), context=context, image_tokens=image_tokens, server=server)
    shape = rollout_shape(config, context, image_tokens)
    return replace(wanted, num_rollouts=num_rollouts, shape=shape)


def preset_plan(name: PresetName, num_rollouts: int = 0) -> MemoryBudget:
    return plan_memory(preset_request(name, num_rollouts))


@pytest.mark.parametrize(
    ("name", "chosen"), [("24gb-4b", 6), ("h100-4b", 19), ("h100-8b", 8), ("4xh100-32b", 21), ("8xh100-30b-a3b", 97)]
)
def test_a_preset_runs_as_many_rollouts_as_the_prefix_cache_holds(name: PresetName, chosen: int) -> None:
    plan = preset_plan(name)

    assert plan.kept_prefix_frac is not None
    assert plan.kept_prefix_frac >= 0.8
    assert plan.num_rollouts == pytest.approx(chosen, abs=2)
    assert f"rollouts at a time: {plan.num_rollouts};" in plan.table()


def test_more_rollouts_by_hand_than_the_prefix_cache_holds_are_kept_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = preset_plan("h100-8b", num_rollouts=32)

    assert (plan.num_rollouts, plan.kept_prefix_frac and plan.kept_prefix_frac < 0.2) == (32, True)
    assert "max_concurrent_rollouts=32: the KV cache keeps 12 % of the prompts" in caplog.text
    assert "with 8 it keeps 8" in caplog.text
    caplog.clear()
    preset_plan("h100-8b", num_rollouts=4)
    assert not caplog.records


def test_settings_beside_a_preset_win() -> None:
    config = CLIConfig(preset="h100-4b", model_name="Qwen/Qwen3-VL-2B-Instruct", max_turns=7)

    assert (config.model_name, config.max_turns, config.max_tokens) == ("Qwen/Qwen3-VL-2B-Instruct", 7, 1024)
    split = CLIConfig(preset="8xh100-30b-a3b"), CLIConfig(preset="8xh100-30b-a3b", base_url="http://elsewhere/v1")
    assert [one.server.tensor_parallel for one in split] == [2, None]
    # boxes cost money while they run, whatever the machine could serve
    assert CLIConfig(preset="h100-4b", device="gbox", gbox_api_key="key").max_concurrent_rollouts == 8
    assert CLIConfig(preset="laptop") == CLIConfig(preset="laptop", max_concurrent_rollouts=16)


def test_the_ladder_trains_its_own_model_on_all_demo_tasks_unless_others_are_given() -> None:
    config = CLIConfig(preset="ladder")
    assert find_model(config.model_name) == LADDER_QWEN3_VL
    assert config.tasks == {"source_type": "demo_training"}
    assert config.eval_tasks == {"source_type": "demo_eval"}

    pages = {"source_type": "miniwob", "task_names": ["click-color"]}
    assert CLIConfig(preset="ladder", tasks=pages).eval_tasks == pages


def test_a_machine_is_as_small_as_its_smallest_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0, GPU-a, 81559\\n1, GPU-b, 24564\\n2, GPU-c, [N/A]\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")

    machine = find_machine(None, {"CUDA_VISIBLE_DEVICES": "0,1"}, is_dry_run=False)

    assert (machine.gpus, machine.gpu_gib) == (("0", "1"), pytest.approx(23.99, abs=0.01))
    assert find_machine(None, {}, is_dry_run=False).gpu_gib is None
    assert find_machine(None, {"CUDA_VISIBLE_DEVICES": ""}, is_dry_run=False).gpu_gib is None


def test_another_machine_is_for_dry_runs_alone() -> None:
    with pytest.raises(ConfigError, match="machine: expected it only with dry_run=true"):
        find_machine("4x80", {}, is_dry_run=False)


def test_dimensions_that_a_folder_does_not_state_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "text_config": {"num_attention_heads": 4}}')

    with pytest.raises(ConfigError, match=r"expected a config\.json that states hidden_size"):
        load_model_sizes(tmp_path)


@pytest.mark.parametrize("context", [64, 512, 1024, 2048])
@pytest.mark.parametrize("block_tokens", [16, 128])
def test_a_tiny_context_loses_no_blocks(context: int, block_tokens: int) -> None:
    shape = RolloutShape(num_turns=9, screen_tokens=77, max_images=9, drop=1, context_tokens=context)

    found = simulate_prefix_cache(shape, num_blocks=20_000, block_tokens=block_tokens, num_rollouts=40)

    assert found > 0.75 or context == 64
