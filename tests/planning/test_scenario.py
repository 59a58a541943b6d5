import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.planning.fleet import NOISE, bounds, controller_turn_s, find_bottleneck, one_more
from cua_rl.planning.gpu_speed import GPU_KINDS, TurnTokens, image_flop, server_speed, token_flop
from cua_rl.planning.plan_config import Assumptions, PlanConfig
from cua_rl.planning.scenario import find_prices, planned_scenario, spread_turns
from cua_rl.planning.simulation import predict
from cua_rl.recipes.plan import main
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError

MODELS = Path(__file__).parents[1] / "machine" / "model_configs"
MODEL_4B = load_model_sizes(MODELS / "Qwen3-VL-4B-Instruct")
TOKENS = 1500 + 10 / 2 * (2550 + 60 + 150)
"""Of a prompt in the middle of ten turns."""
LONG = {"max_tokens": 1024, "max_steps_off_policy": 2}


def config(**changes: Any) -> PlanConfig:
    return PlanConfig(**{"model_name": str(MODELS / "Qwen3-VL-4B-Instruct"), "gpus": "8xh100", **LONG, **changes})


def test_long_sequences_cost_what_was_counted_for_them() -> None:
    # 40 rollouts of 30,000 tokens with recomputed activations: 68 PFLOP
    total = 40 * 30_000 * token_flop(MODEL_4B, 30_000, 32, recomputes=True)

    assert total == pytest.approx(68e15, rel=0.1)
    assert token_flop(MODEL_4B, 30_000, 32, recomputes=False) < 0.8 * total / 1.2e6
    kept = token_flop(MODEL_4B, 30_000, 32, recomputes=True, keeps_attention=True)
    assert total / 1.2e6 - kept == 36 * 4 * 4096 * 15_000  # scores and values of half of the tokens, once


def test_the_vision_tower_costs_more_than_in_proportion_to_the_screenshot() -> None:
    assert image_flop(MODEL_4B, 2000) > 2 * image_flop(MODEL_4B, 1000) > 0
    # 3,840 patches: 24 blocks of 4 x 1024 x 1024 and 2 x 1024 x 4096, a product of 1536 x 1024; 960 tokens: 4 mergers
    # of 4096 x (4096 + 2560); 24 x 1024 wide scores and values of all pairs of patches
    products = 3840 * (24 * 12 * 1024**2 + 1536 * 1024) + 960 * 4 * 4096 * (4096 + 2560)
    assert image_flop(MODEL_4B, 960) == pytest.approx(2 * products + 4 * 24 * 1024 * 3840**2, rel=0.01)


def test_a_small_batch_takes_as_long_as_reading_the_weights() -> None:
    turn = TurnTokens(screen=0, text=0, sampled=1, context=0)
    assume = Assumptions(trainer_mfu=1.0, server_mfu=1.0, bandwidth_frac=1.0)

    one = server_speed(MODEL_4B, GPU_KINDS["h100"], 1, turn, assume)
    two = server_speed(MODEL_4B, GPU_KINDS["h100"], 2, turn, assume)

    # 4.44 billion parameters of two bytes at 3,350 GB/s, and 4 ms of the server's own
    assert one.alone_s == pytest.approx(0.004 + 2 * MODEL_4B.parameters / 3350e9)
    assert two.alone_s - 0.004 == pytest.approx((one.alone_s - 0.004) / 2)
    assert one.each_s == pytest.approx(2 * MODEL_4B.parameters / 989e12)


def test_gpus_are_placed_as_a_run_would_place_them() -> None:
    placed = planned_scenario(config(), []).fleet.placement
    alone = planned_scenario(config(gpus="1xh100"), []).fleet.placement

    assert (placed.num_servers, placed.gpus_per_server, placed.num_trainers, placed.is_shared) == (4, 1, 4, False)
    assert alone.is_shared
    assert alone.num_gpus == 1


def test_what_is_assumed_is_what_was_set() -> None:
    assume = Assumptions(device_s=7.0, num_turns=3, constant_group_frac=0.0)
    scenario = planned_scenario(config(assume=assume, max_concurrent_rollouts=77, rollout_workers=4), [])

    assert scenario.workload.turn.own.mean == 7.0
    assert scenario.workload.mean_turns == pytest.approx(3, rel=0.02)
    assert scenario.workload.constant_group_frac == 0.0
    assert (scenario.fleet.num_controllers, scenario.fleet.num_devices) == (4, 77)
    assert scenario.schedule.max_lag == 2


@pytest.mark.parametrize(
    ("assume", "controller_s"),
    [
        ({}, controller_turn_s(300, TOKENS)),
        ({"screen_kb": 10}, controller_turn_s(10, TOKENS)),
        ({"screen_kb": 10, "controller_s": 0.5}, 0.5),
    ],
)
def test_the_controllers_time_is_that_of_the_screenshots_unless_it_is_set(
    assume: dict[str, float], controller_s: float
) -> None:
    assert planned_scenario(config(assume=Assumptions(**assume)), []).workload.controller_s == controller_s


@pytest.mark.parametrize(
    ("changes", "bottleneck"),
    [
        # sampling and training take turns on one GPU: those of their own would wait for each other as well
        ({"preset": "24gb-4b", "gpus": "1xrtx4090", "max_steps_off_policy": None}, "schedule"),
        ({"gpus": "2xh100", "assume": Assumptions(controller_s=1.0), "max_steps_off_policy": 6}, "controller"),
        ({"gpus": "2xh100", "assume": Assumptions(device_s=60.0), "max_steps_off_policy": 6}, "devices"),
    ],
)
def test_more_of_the_bottleneck_is_what_brings_most(changes: dict[str, Any], bottleneck: str) -> None:
    small = {"group_size": 4, "groups_per_batch": 4, "max_concurrent_rollouts": 16, "max_turns": 8, "max_tokens": 256}
    scenario = planned_scenario(config(**small | changes), [])

    now = predict(scenario).rollouts_per_hour
    gains = {part: predict(one).rollouts_per_hour / now - 1 for part, (_, one) in one_more(scenario).items()}

    assert find_bottleneck(bounds(scenario), gains) == bottleneck
    assert gains[bottleneck] == max(gains.values()) >= NOISE
    assert gains.get("sampling and training", 0.0) < NOISE


def test_the_price_is_that_of_the_kind_unless_it_is_set() -> None:
    assert find_prices(config()).gpu == GPU_KINDS["h100"].usd_per_hour
    assert find_prices(config(gpu_usd_per_hour=9.0)).gpu == 9.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": None}, "gpus: expected the GPUs to plan for, such as 8xh100, or a recorded run"),
        ({"gpus": "8"}, "gpus: expected a number from 1 to 64 and a kind among l4, a10g"),
        ({"gpus": "65xh100"}, "gpus: expected a number from 1 to 64"),
        ({"gpus": "8xtpu"}, "got '8xtpu'"),
        ({"gpus": "1xl4", "model_name": str(MODELS / "Qwen3-VL-32B-Instruct")}, "memory"),
        ({"base_url": "http://10.0.0.2:8000/v1"}, "base_url: expected None with gpus=8xh100"),
        ({"trainer": TrainerConfig(num_nodes=2)}, r"trainer\.num_nodes: expected None with gpus=8xh100"),
        ({"assume": Assumptions(num_turns=21)}, r"assume\.num_turns: expected at most max_turns=20, got 21"),
        ({"assume": Assumptions(constant_group_frac=1.5)}, "expected a share, at most 1, got 1.5"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned_scenario(config(**changes), [])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="from_run: expected the folder of a run"):
        config(from_run=[str(tmp_path)])
    (tmp_path / "config.json").write_text('{"data": "experts"}')  # of a supervised run
    with pytest.raises(ConfigError, match=r"from_run: expected a run of recipes\.train .* without 'server'"):
        config(from_run=[str(tmp_path)])


def test_settings_come_from_the_recorded_run_unless_they_are_given(tmp_path: Path) -> None:
    recorded = PlanConfig(group_size=6, max_concurrent_rollouts=9, from_run=None)
    kept = {name: getattr(recorded, name) for name in ("model_name", "lora_rank", "max_turns", "max_tokens")}
    kept |= {"group_size": 6, "groups_per_batch": 3, "max_concurrent_rollouts": 9, "max_steps_off_policy": None}
    (tmp_path / "config.json").write_text(json.dumps({**kept, "server": {"max_model_len": 4096, "max_pixels": None}}))

    found = PlanConfig(from_run=[str(tmp_path)], groups_per_batch=7)

    assert (found.group_size, found.groups_per_batch, found.max_concurrent_rollouts) == (6, 7, 9)
    assert found.server.max_model_len == 4096


@example(mean=37.96875, largest=38)
@given(st.floats(1, 40), st.integers(1, 40))
def test_turns_have_their_mean_and_their_limit(mean: float, largest: int) -> None:
    turns = spread_turns(mean, largest)

    assert 1 <= min(turns) <= max(turns) <= largest
    assert fmean(turns) == pytest.approx(min(mean, largest), abs=0.06)


def test_the_recipe_prints_the_bottleneck_and_writes_plot_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"model_name={MODELS / 'Qwen3-VL-4B-Instruct'}", "gpus=2xh100", "max_tokens=1024", "group_size=2"]
    arguments += ["groups_per_batch=2", "max_turns=4", "max_concurrent_rollouts=4", "device_usd_per_hour=0.1"]

    assert main([*arguments, f"plot={tmp_path / 'plan.png'}", f"json={tmp_path / 'plan.json'}"]) == 0
    assert main([*arguments, "plot=none", f"json={tmp_path / 'plan.json' / 'below a file'}"]) == 2

    shown = capsys.readouterr().out
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert f"Bottleneck: {figures['bottleneck']}" in shown
    assert "+ 1 GPU for training" in shown
    planned = figures["planned"]
    hourly = 2 * GPU_KINDS["h100"].usd_per_hour + 4 * 0.1
    assert planned["usd_per_1000_rollouts"] == pytest.approx(1000 * hourly / planned["rollouts_per_hour"])
    assert [one["num_devices"] for one in figures["by_devices"]] == [1, 2, 4, 8]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
