"""What a regression suite promises, against simulated checkpoints."""

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import sqrt
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

import pytest

from cua_rl.command_line.fields import with_values
from cua_rl.evaluation.attempts import Attempt
from cua_rl.run import suite
from cua_rl.run.suite import (
    SuiteConfig,
    compare_checkpoints,
    describe,
    may_accept,
    power_of,
    require_answer,
    require_power,
    run_suite,
)
from cua_rl.types.errors import ConfigError, SamplingError

NUM_COMPARISONS = 200
ATTEMPT = Attempt(
    model="", position=0, task_id="task", seed=0, attempt=0, category="app", difficulty="easy", success=True,
    reward=1.0, num_turns=1, stop_reason="finished", num_faults=0, duration_s=1.0,
)  # fmt: skip


@contextmanager
def processor_time(*, at_most_s: float) -> Generator[None]:
    began = process_time()
    yield
    assert process_time() - began < at_most_s


def attempts_of(model: str, outcomes: Sequence[bool | None]) -> list[Attempt]:
    return [replace(ATTEMPT, model=model, position=place, success=done) for place, done in enumerate(outcomes)]


def simulate(rng: Random, config: SuiteConfig, fall: float) -> list[Attempt]:
    """Two checkpoints, of which the second has lost `fall` of the tasks, beside those that come and go."""
    better = config.churn / 2
    before, now = list[bool](), list[bool]()
    for _ in range(config.num_tasks):
        drawn = rng.random()
        is_worse, is_better = drawn < better + fall, better + fall <= drawn < 2 * better + fall
        before.append(is_worse or (not is_better and rng.random() < 0.7))
        now.append(before[-1] != (is_worse or is_better))
    return [*attempts_of("accepted", before), *attempts_of("candidate", now)]


@pytest.mark.parametrize("config", [SuiteConfig(), SuiteConfig(num_tasks=256, churn=0.3, power=0.7)])
def test_alarms_are_as_frequent_as_promised_with_and_without_a_fall(config: SuiteConfig) -> None:
    rng, power = Random(0), power_of(config, config.num_tasks)

    false_alarms, found = (
        sum(
            compare_checkpoints(config, simulate(rng, config, fall), "accepted", "candidate").is_regression
            for _ in range(NUM_COMPARISONS)
        )
        for fall in (0.0, config.fall)
    )

    assert false_alarms <= config.false_alarms * NUM_COMPARISONS
    assert power >= config.power
    # three standard deviations of a share of so many
    assert abs(found / NUM_COMPARISONS - power) <= 3 * sqrt(power * (1 - power) / NUM_COMPARISONS)


def test_tasks_lost_to_faults_are_left_out_and_lower_the_power() -> None:
    config = SuiteConfig()
    before: list[bool | None] = [True] * config.num_tasks
    now: list[bool | None] = [None] * 100 + [True] * (config.num_tasks - 100)

    result = compare_checkpoints(
        config, [*attempts_of("accepted", before), *attempts_of("candidate", now)], "accepted", "candidate"
    )

    assert (result.pair.num_tasks, result.p_value, result.is_regression) == (config.num_tasks - 100, 1.0, False)
    assert result.power < config.power
    assert "no regression" in describe(config, result, "accepted")


@pytest.mark.parametrize(("num_lost", "expected"), [(0, True), (100, False)])
def test_a_checkpoint_that_faults_have_kept_from_being_compared_is_not_accepted(num_lost: int, expected: bool) -> None:
    config = SuiteConfig(accept=True)
    before: list[bool | None] = [True] * config.num_tasks
    now = [None] * num_lost + before[num_lost:]
    attempts = [*attempts_of("accepted", before), *attempts_of("candidate", now)]

    result = compare_checkpoints(config, attempts, "accepted", "candidate")

    assert may_accept(config, result) is expected
    with nullcontext() if expected else pytest.raises(SamplingError, match=r"got 44 tasks .* run the same command"):
        require_answer(config, result)  # of which CI sees the exit status
    assert ("fewer than power=0.8 needs" in describe(config, result, "accepted")) is not expected


def test_too_few_tasks_for_the_promise_are_refused_with_how_many_are_enough() -> None:
    with pytest.raises(ConfigError, match=r"got 64, which find it with 0\.46; set num_tasks=") as refused:
        require_power(SuiteConfig(num_tasks=64))

    enough = int(str(refused.value).rpartition("=")[2])
    require_power(SuiteConfig(num_tasks=enough))


@pytest.mark.parametrize(
    "changes", [{"fall": 0.01}, {"power": 1.0}, {"fall": 0.02, "num_tasks": 600}, {"fall": 0.3, "churn": 1.0}]
)
def test_a_power_that_no_number_of_tasks_reaches_is_refused_at_once(changes: dict[str, Any]) -> None:
    with processor_time(at_most_s=5), pytest.raises(ConfigError, match="raise fall, or lower power or churn"):
        require_power(SuiteConfig(**changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_attempts": 2}, "one attempt at each task"),
        ({"models": [{"name": "a"}, {"name": "b"}]}, "expected one checkpoint"),
        ({"log_path": None}, "log_path"),
    ],
)
async def test_what_is_no_comparison_with_the_accepted_checkpoint_is_refused(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        await run_suite(with_values(SuiteConfig(log_path=str(tmp_path)), **changes))


async def test_what_a_suite_of_another_checkpoint_recorded_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def evaluate(config: SuiteConfig) -> None:
        meanwhile = json.loads((tmp_path / "suite.json").read_text())
        meanwhile["models"]["other"] = {"model": "x"}
        (tmp_path / "suite.json").write_text(json.dumps(meanwhile))

    monkeypatch.setattr(suite, "run_evaluation", evaluate)
    await run_suite(with_values(SuiteConfig(log_path=str(tmp_path)), models=[{"name": "candidate"}]))
    recorded = json.loads((tmp_path / "suite.json").read_text())
    assert (recorded["accepted"], {*recorded["models"]}) == ("candidate", {"other", "candidate"})


async def test_a_name_stays_that_of_its_checkpoint_although_the_suite_was_killed_at_its_first_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def evaluate(config: SuiteConfig) -> None:
        raise SamplingError("killed")

    monkeypatch.setattr(suite, "run_evaluation", evaluate)
    config = SuiteConfig(log_path=str(tmp_path / "suite"), models=[{"name": "week-2"}])
    with pytest.raises(SamplingError):
        await run_suite(config)
    with pytest.raises(SamplingError):  # the same one goes on
        await run_suite(config)
    other: dict[str, object] = {"name": "week-2", "base_url": "http://127.0.0.1:9/v1", "model": "other"}
    with pytest.raises(ConfigError, match="expected a new name for another checkpoint, got 'week-2'"):
        await run_suite(with_values(config, models=[other]))
