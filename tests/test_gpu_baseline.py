"""The baseline's figures from recorded steps and requests, worked by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_baseline import TASKS, DoneStep, Request, is_over, measure, open_s, sampling_flop
from cua_rl.machine.model_sizes import ModelSizes
from cua_rl.task_loader import load_tasks
from cua_rl.types.errors import CuaError

MODEL = ModelSizes(
    hidden=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, intermediate=8, num_experts=0, experts_per_token=0,
    shared_expert=0, vocabulary=10, is_head_tied=True, vision_parameters=100, vision_layers=1, vision_hidden=2,
    vision_intermediate=4, feature_levels=1, pixel_bytes_per_token=0, has_head_norms=False,
)  # fmt: skip
REQUEST = Request(step=2, start_s=0.0, end_s=1.0, prompt=6, cached=2, sampled=3, screenshots={"a": 1})
TRAINED = {
    "rollout/sampled_tokens": 300.0, "rollout/num_rollouts": 8.0, "rollout/datum_tokens": 2000.0,
    "reward/success_rate": 0.5, "optim/num_substeps": 1.0,
    "trainer/tokens": 4000.0, "trainer/trained_tokens": 250.0, "trainer/encoded_images": 10.0, "trainer/busy_s": 10.0,
    "trainer/vision_tflop": 40.0, "trainer/language_tflop": 140.0, "trainer/lora_tflop": 10.0,
    "trainer/head_tflop": 10.0, "trainer/peak_cuda_gib": 30.0, "trainer/peak_rss_gib": 5.0,
}  # fmt: skip
STEPS = (
    DoneStep(ended_s=100.0, metrics=TRAINED | {"trainer/peak_cuda_gib": 31.0, "reward/success_rate": 0.25}),
    DoneStep(ended_s=150.0, metrics=TRAINED),
)
REQUESTS = (
    replace(REQUEST, start_s=110.0, end_s=120.0),
    replace(REQUEST, start_s=115.0, end_s=125.0, screenshots={"a": 1, "b": 1}),
    replace(REQUEST, start_s=130.0, end_s=135.0, screenshots={}),
)


def test_sampling_costs_tokens_outside_the_cache_and_each_screenshot_once() -> None:
    # a layer: queries 4 x 4, keys and values 4 x 2 each, outputs 4 x 4 (48), 3 x 4 x 8 (96), two norms of 4 and two of
    # heads (12): 156. Rank 1: inputs and outputs of q (8), k, v (6 each), o (8), three of 12: 64 a layer.
    # 8 - 2 = 6 tokens of 2 x (2 x 156 + 2 x 64) = 880: 5280. They see 3 + 4 + ... + 8 = 33 tokens, at 2 layers x
    # scores and values x 2 x 4 wide: 32 x 33 = 1056. The head for three tokens: 3 x 2 x 10 x 4 = 240.
    # A screenshot: 4 patches. Its merger has (8 x 8 + 8 x 4) = 96 of the 100 parameters: 2 x (4 x 4 + 96), and 4 x 4
    # pairs x 2 wide x scores and values x 2: 224 + 128 = 352.
    once = sampling_flop(MODEL, 1, [REQUEST])
    twice = sampling_flop(MODEL, 1, [REQUEST, REQUEST])
    next_step = sampling_flop(MODEL, 1, [REQUEST, replace(REQUEST, step=3)])

    assert (once, twice, next_step) == (6576 + 352, 2 * 6576 + 352, 2 * (6576 + 352))


def test_figures_are_those_worked_by_hand() -> None:
    assert open_s(REQUESTS) == 20.0  # 110 to 125, 130 to 135

    figures = measure(STEPS, REQUESTS, sampling_tflop=100.0, peak_tflop_per_s=100.0)

    assert figures["seconds"] == {"whole": 50.0, "sampling": 20.0, "training": 10.0, "idle": 20.0}
    assert figures["time_frac"] == {"sampling": 0.4, "training": 0.2, "idle": 0.4}
    assert figures["tokens_per_s"] == {"sampling": 15.0, "training": 400.0, "whole": 40.0}
    assert figures["images_per_s"] == {"training": 1.0, "whole": 0.04}  # two distinct ones in 50 s
    assert figures["rollouts_per_hour"] == 576.0
    # 40 and 160 x 10^12 operations in 10 s, 100 in 20 s, 300 in 50 s, of 100 a second
    assert figures["mfu"] == pytest.approx(
        {"vision": 0.04, "language": 0.16, "training": 0.2, "sampling": 0.05, "whole": 0.06}
    )
    mfu, share = figures["mfu"], figures["time_frac"]
    assert mfu["whole"] == pytest.approx(mfu["training"] * share["training"] + mfu["sampling"] * share["sampling"])
    assert figures["peak_memory_gib"] == {"trainer_tensors": 31.0, "trainer_reserved": None, "trainer_main": 5.0}
    assert (figures["success_rate"], figures["rollouts"]) == ([0.25, 0.5], [8.0, 8.0])


def test_without_a_known_peak_there_is_a_reason_and_no_mfu() -> None:
    figures = measure(STEPS, REQUESTS, sampling_tflop=100.0, peak_tflop_per_s=None)

    assert figures["mfu"] is None
    assert figures["mfu_missing"] == "no data-sheet peak of this device is known"


@pytest.mark.parametrize("lost", ["rollout/sampled_tokens", "rollout/num_rollouts", "trainer/encoded_images"])
def test_what_has_not_taken_place_is_not_measured(lost: str) -> None:
    step = DoneStep(ended_s=150.0, metrics={name: value for name, value in TRAINED.items() if name != lost})

    with pytest.raises(CuaError, match=lost):
        measure((STEPS[0], step), REQUESTS, sampling_tflop=1.0, peak_tflop_per_s=None)
    with pytest.raises(CuaError, match="requests"):
        measure(STEPS, (), sampling_tflop=1.0, peak_tflop_per_s=None)
    with pytest.raises(CuaError, match="got 0 steps"):
        measure(STEPS[:1], REQUESTS, sampling_tflop=1.0, peak_tflop_per_s=None)


def test_sampling_beside_training_is_refused() -> None:
    with pytest.raises(CuaError, match="sample, then train"):
        measure(STEPS, [replace(REQUEST, start_s=100.0, end_s=149.0)], sampling_tflop=1.0, peak_tflop_per_s=None)


@pytest.mark.parametrize(
    ("steps_s", "left_s", "ends"), [([50.0], -5.0, False), ([90.0, 50.0], 49.0, True), ([90.0, 50.0], 51.0, False)]
)
def test_no_step_is_begun_that_would_not_end_in_time(steps_s: list[float], left_s: float, ends: bool) -> None:
    assert is_over(steps_s, left_s) is ends


def test_every_step_has_the_same_tasks_on_other_phones() -> None:
    tasks = load_tasks({"source_type": "ids", "task_ids": ",".join(TASKS)}, seed=0, split="train")
    steps = [tasks.batch(number, len(TASKS)) for number in range(3)]

    assert [sorted(task.task_id for task in step) for step in steps] == 3 * [sorted(TASKS)]
    assert len({task.seed for step in steps for task in step}) == 24


def test_the_page_has_every_field() -> None:
    page = (Path(__file__).parents[1] / "docs" / "dev" / "baselines.md").read_text(encoding="utf-8")
    figures = measure(STEPS, REQUESTS, sampling_tflop=1.0, peak_tflop_per_s=1.0)
    nested = {f"{name}.{part}" for name, value in figures.items() if isinstance(value, dict) for part in value}
    plain = {name for name, value in figures.items() if not isinstance(value, dict)}

    assert [name for name in sorted(nested | plain) if f"`{name}`" not in page] == []
