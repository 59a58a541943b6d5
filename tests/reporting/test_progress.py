"""What a person sees."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cua_rl.reporting.pace import TimeLeft
from cua_rl.reporting.progress import ProgressDisplay, starting
from cua_rl.reporting.step_line import (
    format_duration,
    format_evaluation_line,
    format_group_line,
    format_step_line,
    num_of,
)
from cua_rl.reporting.summary import RunSummary, print_summary, write_summary

METRICS = {
    "progress/epoch": 1.25,
    "reward/success_rate": 0.25,
    "reward/mean": 0.25,
    "loss/policy": 0.0234,
    "policy/kl_sampling_training/mean": 0.0078,
    "optim/learning_rate": 1e-5,
    "time/tokens_per_s": 412.6,
    "time/step_s": 3.0,
}


def test_a_step_is_one_line_of_text() -> None:
    assert format_step_line(5, 100, METRICS, TimeLeft(seconds=285.0, is_lower_bound=False)) == (
        "Step 5/100 (5.0%) | Epoch: 1.25 | Success: 0.250 | Reward: 0.250 | Loss: 0.0234 | Sampler gap: 0.0078 | "
        "LR: 1.00e-05 | tok/s: 413 | ETA: 4m45s"
    )


def test_a_step_without_signal_leaves_out_what_it_does_not_have_and_shows_faults() -> None:
    metrics = {"reward/success_rate": 1.0, "rollout/num_faults": 2.0}

    assert format_step_line(1, 3, metrics, None) == "Step 1/3 (33.3%) | Success: 1.000 | Faults: 2"


def test_faults_name_their_workers_the_worst_first() -> None:
    metrics = {
        "rollout/num_faults": 25.0,
        "rollout/worker_faults/worker-1": 3.0,
        "rollout/worker_faults/worker-3": 22.0,
    }

    assert format_step_line(1, 3, metrics, None) == "Step 1/3 (33.3%) | Faults: 25 (worker-3: 22, worker-1: 3)"


def test_the_kl_to_the_base_model_is_shown_where_it_is_measured() -> None:
    for name in ("policy/kl_base", "loss/kl_base"):
        line = format_step_line(1, 3, METRICS | {name: 0.0123}, None)
        assert "| KL: 0.0123 | Sampler gap: 0.0078 |" in line


async def test_a_start_says_what_is_starting_how_long_it_has_taken_and_when_it_is_ready() -> None:
    said: list[str] = []
    now, counted = [0.0], asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        now[0] += 20.0
        if len(said) == 3:
            counted.set()

    async with starting("model server", say, every_s=0.001, clock=lambda: now[0]):
        await counted.wait()
    assert said[:3] == [
        "starting model server",
        "starting model server, 20s so far",
        "starting model server, 40s so far",
    ]
    assert said[-1].startswith("model server: ready after ")

    with pytest.raises(ValueError, match="no memory"):
        async with starting("trainer", said.append):
            raise ValueError("no memory")
    assert said[-1] == "starting trainer"  # an error says the rest


def test_nothing_is_minus_zero() -> None:
    rounded_away = METRICS | {"policy/kl_sampling_training/mean": -4e-6, "reward/mean": -1e-9}

    line = format_step_line(1, 3, rounded_away, None) + format_group_line(0, [-1e-9, -1e-9])

    assert "-0.0" not in line
    assert "| Sampler gap: 0.0000 |" in line


def test_one_of_a_thing_has_no_plural() -> None:
    assert [num_of(n, "task") for n in (0, 1, 2, 3072)] == ["0 tasks", "1 task", "2 tasks", "3,072 tasks"]
    metrics = {"eval/x/success_rate": 0.5, "eval/x/num_rollouts": 1.0}
    assert format_evaluation_line("Baseline", "x", metrics) == "Baseline x | Success: 0.500 (1 rollout)"


def test_a_group_is_one_line_with_mean_and_standard_deviation() -> None:
    # mean 1/4, variance 1/4 * 3/4 = 0.1875
    assert format_group_line(0, [0.0, 1.0, 0.0, 0.0]) == (
        "[GRPO Group 0] Rewards: ['0.000', '1.000', '0.000', '0.000'] | Mean: 0.250 | Std: 0.433"
    )
    assert format_group_line(1, []) == "[GRPO Group 1] Rewards: [] (every rollout met a fault)"


def test_durations_are_short() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.4, 75, 3700)] == ["0s", "59s", "1m15s", "1h01m"]


def test_outside_a_terminal_every_event_is_one_plain_line() -> None:
    output = io.StringIO()
    now = [0.0]

    console = Console(file=output, width=60, soft_wrap=True)
    with ProgressDisplay(10, eval_every=0, console=console, clock=lambda: now[0]) as display:
        display.status("starting the model server")
        display.evaluation(
            "Baseline",
            "held_out",
            {
                "eval/held_out/success_rate": 0.40625,
                "eval/held_out/success_rate_low": 0.29,
                "eval/held_out/success_rate_high": 0.53,
                "eval/held_out/num_rollouts": 64.0,
                "eval/held_out/num_faults": 3.0,
                "eval/held_out/success_rate_worst": 0.39,
                "eval/held_out/success_rate_best": 0.43,
            },
        )
        display.begin_steps()
        now[0] = 4.0
        display.step(1, METRICS)
        now[0] = 68.0
        display.evaluation("Eval", "held_out", {"eval/held_out/success_rate": 0.5, "eval/held_out/time_s": 60.0})
        now[0] = 72.0
        display.step(2, METRICS)

    # the first step leaves 9 x 4 s and evaluations of unknown length; 12 s for 2 steps without the evaluation leave
    # 8 x 6 s and the last evaluation
    assert output.getvalue().splitlines() == [
        "starting the model server",
        "Baseline held_out | Success: 0.406 (95 % interval 0.29-0.53, 64 rollouts, "
        "3 faults: 0.39-0.43 if all had failed or succeeded)",
        "Step 1/10 (10.0%) | Epoch: 1.25 | Success: 0.250 | Reward: 0.250 | Loss: 0.0234 | Sampler gap: 0.0078 | "
        "LR: 1.00e-05 | tok/s: 413 | ETA: >36s",
        "Eval held_out | Success: 0.500",
        "Step 2/10 (20.0%) | Epoch: 1.25 | Success: 0.250 | Reward: 0.250 | Loss: 0.0234 | Sampler gap: 0.0078 | "
        "LR: 1.00e-05 | tok/s: 413 | ETA: 1m48s",
    ]


def test_in_a_terminal_the_lines_are_the_same_and_a_bar_is_added() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=200)

    with ProgressDisplay(10, console=console) as display:
        display.status("evaluating")
        display.step(2, METRICS)

    assert "Step 2/10 (20.0%) | Epoch: 1.25 | Success: 0.250" in output.getvalue()
    assert "step 2/10" in output.getvalue()


SUMMARY = RunSummary(
    run_name="demo",
    log_path="runs/demo",
    baseline_success_rate=0.40625,
    final_success_rate=0.953125,
    num_eval_rollouts=64,
    num_steps=60,
    setup_time_s=48.2,
    train_time_s=312.0,
    parity_mean_abs=0.00213,
    retokenised_tokens=0,
)


def test_the_summary_is_a_file_for_machines(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", SUMMARY)

    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["baseline_success_rate"] == 0.40625
    assert figures["final_success_rate"] == 0.953125
    assert (figures["num_eval_rollouts"], figures["num_steps"], figures["retokenised_tokens"]) == (64, 60, 0)


def test_a_run_with_brackets_in_its_name_has_its_summary_under_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(replace(SUMMARY, run_name="demo[red][/v2]"))

    assert "Run demo[red][/v2]" in capsys.readouterr().out


def test_the_summary_is_a_table_for_people() -> None:
    output = io.StringIO()

    print_summary(SUMMARY, Console(file=output, width=100))

    for part in ("40.6 %", "95.3 %", "5m12s", "2.1e-03 nats", "runs/demo"):
        assert part in output.getvalue()
