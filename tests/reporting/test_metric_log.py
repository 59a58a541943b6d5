"""Metric files: what is written, what a resume leaves behind, what is refused."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.reporting.json_lines import read_records
from cua_rl.reporting.metric_log import MetricLog, require_wandb
from cua_rl.reporting.progress import ProgressDisplay
from cua_rl.reporting.run_report import RunReport
from cua_rl.types.errors import ConfigError


def test_metrics_are_kept_under_their_step(tmp_path: Path) -> None:
    with MetricLog(tmp_path, config={}) as log:
        log.log(0, {"eval/held_out/success_rate": 0.4})
        log.log(1, {"reward/mean": 0.5, "rollout/num_rollouts": 8})

    assert read_records(tmp_path / "metrics.jsonl") == [
        {"step": 0, "eval/held_out/success_rate": 0.4},
        {"step": 1, "reward/mean": 0.5, "rollout/num_rollouts": 8.0},
    ]


@pytest.mark.parametrize(("first_step", "left"), [(2, [(1, 0.1), (2, 0.9)]), (1, [(1, 0.9)])])
def test_tensorboard_reads_back_what_was_written_and_forgets_what_a_resume_redoes(
    first_step: int, left: list[tuple[int, float]], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricLog(tmp_path, config={}) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": step / 10})
    for file in (tmp_path / "tensorboard").iterdir():  # files are read in the order of the second in their names,
        file.rename(file.with_name("events.out.tfevents.0000000001.earlier"))  # and a resume comes later than that
    with MetricLog(tmp_path, config={}, first_step=first_step) as log:
        log.log(first_step, {"reward/mean": 0.9})

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]
    assert points == left


def test_an_unknown_metric_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with MetricLog(tmp_path, config={}) as log, pytest.raises(ValueError, match="reward/maen"):
        log.log(1, {"reward/maen": 0.5})

    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_value_that_is_not_finite_is_stored_as_null_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricLog(tmp_path, config={}) as log, caplog.at_level(logging.WARNING):
        log.log(1, {"reward/mean": 0.5, "optim/grad_norm": float("inf")})

    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "optim/grad_norm": None}]
    assert "optim/grad_norm" in caplog.text


def test_writing_metrics_imports_neither_torch_nor_tensorflow_nor_wandb(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from cua_rl.reporting.metric_log import MetricLog
with MetricLog(Path({str(tmp_path)!r}), config={{}}) as log:
    log.log(1, {{"reward/mean": 0.5}})
heavy = {{"torch", "tensorflow", "wandb", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
"""

    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_run_for_weights_and_biases_without_its_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python does for a package that is not installed

    with pytest.raises(ConfigError, match=r"pip install 'cua_rl\[wandb\]'"):
        MetricLog(tmp_path, config={}, wandb_project="agents")
    require_wandb(None)


def test_weights_and_biases_needs_a_key_only_where_it_goes_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = {"HOME": str(tmp_path)}

    with pytest.raises(ConfigError, match="expected a key of Weights & Biases, got none with wandb_project='agents'"):
        require_wandb("agents", home)
    with pytest.raises(ConfigError, match=r"WANDB_MODE: expected one of online, offline, .*, got 'nonsense'"):
        require_wandb("agents", {**home, "WANDB_MODE": "nonsense", "WANDB_API_KEY": "k"})
    require_wandb(None, {**home, "WANDB_MODE": "nonsense"})
    require_wandb("agents", {**home, "WANDB_API_KEY": "k"})
    for mode in ("offline", "disabled", "dryrun"):
        require_wandb("agents", {**home, "WANDB_MODE": mode})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    require_wandb("agents", home)
    with pytest.raises(ConfigError, match="expected a key"):
        require_wandb("agents", {**home, "WANDB_BASE_URL": "https://wandb.example.org"})
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")  # what `wandb offline` writes
    require_wandb("agents", {**home, "WANDB_BASE_URL": "https://wandb.example.org"})


class _Result:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def metrics(self, suite: str) -> dict[str, float]:
        return {f"eval/{suite}/success_rate": self.rate, f"eval/{suite}/num_rollouts": 64.0}


def test_a_resumed_run_reports_the_figures_of_all_its_attempts(tmp_path: Path) -> None:
    def attempt(first_step: int) -> RunReport:
        log = MetricLog(tmp_path, config={}, first_step=first_step)
        return RunReport(metric_log=log, display=ProgressDisplay(2), total_steps=2)

    first = attempt(1)
    first.log_evaluation("baseline", 0, _Result(0.4))
    first.log_step(
        1, {"policy/parity_mean_abs": 0.001, "rollout/trained_tokens": 300.0, "rollout/retokenised_tokens": 0.0}
    )
    second = attempt(2)
    second.log_step(
        2, {"policy/parity_mean_abs": 0.005, "rollout/trained_tokens": 100.0, "rollout/retokenised_tokens": 0.0}
    )
    assert second.final_success_rate is None
    second.log_evaluation("eval", 2, _Result(0.9))

    assert second.baseline_success_rate == 0.4
    assert second.final_success_rate == 0.9
    assert second.num_eval_rollouts == 64
    assert second.retokenised_tokens == 0
    # (0.001 x 300 + 0.005 x 100) / 400 tokens
    assert second.parity_mean_abs == pytest.approx(0.002)


def test_success_is_compared_within_the_curve_that_a_resume_with_other_tasks_began(tmp_path: Path) -> None:
    def attempt(curve: int, baseline_step: int) -> RunReport:
        log = MetricLog(tmp_path, config={}, first_step=baseline_step + 1)
        display = ProgressDisplay(4)
        return RunReport(metric_log=log, display=display, total_steps=4, curve=curve, baseline_step=baseline_step)

    first = attempt(1, 0)
    first.log_evaluation("baseline", 0, _Result(0.1))
    first.log_evaluation("eval", 2, _Result(0.2))
    second = attempt(2, 2)
    assert (second.baseline_success_rate, second.final_success_rate) == (None, None)
    second.log_evaluation("baseline", 2, _Result(0.6))
    second.log_step(3, {"reward/success_rate": 0.5})
    second.log_evaluation("eval", 4, _Result(0.7))

    assert (first.baseline_success_rate, first.final_success_rate) == (0.1, 0.2)
    assert (second.baseline_success_rate, second.final_success_rate) == (0.6, 0.7)
