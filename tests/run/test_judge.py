"""Which judge a run has, and which it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.parsing import make_config
from cua_rl.evaluation.judge_calibration import Judged, calibration_json, confusion, load_calibration
from cua_rl.judge.config import JudgeConfig
from cua_rl.recipes.train import main
from cua_rl.run.judge import calibration_path, make_judge_config, plan_judge, require_precision
from cua_rl.run.training_config import CLIConfig
from cua_rl.task_loader import TaskSet, load_tasks
from cua_rl.types.errors import ConfigError
from tests.doubles.judge_endpoint import KEY, MODEL, JudgeEndpoint, serve_judge, verdict

ENDPOINT = {"judge_base_url": "http://127.0.0.1:9/v1", "judge_model": MODEL}
JUDGED: dict[str, object] = {"source_type": "custom", "custom_tasks": ["Open Mail."]}
VALIDATED: dict[str, object] = {"source_type": "demo_training", "tags": ["demo"]}


def tasks(source: dict[str, object]) -> TaskSet:
    return load_tasks(source, seed=0, split="train", has_judge=True)


def settings(**given: Any) -> JudgeConfig:
    return make_config(CLIConfig, given).judge


def judge(**changes: Any) -> JudgeConfig:
    found = make_judge_config(settings(**ENDPOINT | changes))
    assert found is not None
    return found


def calibrate(config: JudgeConfig, folder: Path, *, right: int, wrong: int, refused: int) -> None:
    """A record of so many right and wrong verdicts "success", and failures that the judge saw, each of another task."""
    path = calibration_path(config, str(folder))
    path.parent.mkdir(exist_ok=True)
    verdicts = [(True, True)] * right + [(False, True)] * wrong + [(False, False)] * refused
    judged = [known(truth, verdict, seed) for seed, (truth, verdict) in enumerate(verdicts)]
    path.write_text(json.dumps(calibration_json(config, judged, {})))


def known(truth: bool, verdict: bool | None = True, seed: int = 0) -> Judged:
    task: dict[str, Any] = {"task_id": "t", "seed": seed, "category": "app"}
    return Judged(rollout_id="r", truth=truth, verdict=verdict, agreement=1.0, reason="so it is", **task)


def gate(config: JudgeConfig, folder: Path, least: float | None, **more: Any) -> None:
    require_precision(with_values(config, min_precision=least, **more), str(folder))


def test_the_confusion_matrix_counts_verdicts_by_truth() -> None:
    verdicts = [(True, True)] * 6 + [(False, True)] * 2 + [(True, False)] * 3 + [(False, False), (True, None)]
    judged = [known(truth, verdict, seed) for seed, (truth, verdict) in enumerate(verdicts)]

    matrix = confusion(judged)

    assert (matrix.true_positives, matrix.false_positives) == (6, 2)
    assert (matrix.false_negatives, matrix.true_negatives, matrix.num_without_verdict) == (3, 1, 1)
    assert (matrix.precision[0], matrix.recall[0], matrix.false_positive_rate[0]) == (6 / 8, 6 / 9, 2 / 3)
    assert matrix.precision[1:] == pytest.approx((0.356, 0.955), abs=5e-4)  # 6 in 8, as R's prop.test(6, 8) has it
    assert matrix.balanced_precision[0] == 0.5  # as often "success" for failures as for successes
    assert confusion([]).precision == confusion([]).balanced_precision == (None, 0.0, 1.0)


def test_mistakes_repeated_at_a_task_count_once() -> None:
    judged = [known(True, seed=seed) for seed in range(6)] + [known(False, seed=seed) for seed in (6, 7)]

    assert confusion(judged * 10).precision == pytest.approx(confusion(judged).precision)


def test_nobody_judges_unless_somebody_is_named() -> None:
    assert plan_judge(settings(), "binary", tasks(VALIDATED)) is None
    with pytest.raises(ConfigError, match=r"expected judge\.base_url and judge\.model with reward=judge"):
        plan_judge(settings(), "judge", tasks(VALIDATED))


def test_where_validators_decide_a_judge_is_idle_unless_it_is_to_be_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert plan_judge(settings(**ENDPOINT), "binary", tasks(VALIDATED)) is None
    assert "judge=compare calls it too" in caplog.text
    assert plan_judge(settings(**ENDPOINT, judge="compare"), "binary", tasks(VALIDATED)) is not None
    assert plan_judge(settings(**ENDPOINT), "efficiency", tasks(JUDGED)) is not None
    with pytest.raises(ConfigError, match="expected tasks without a validator with reward=judge"):
        plan_judge(settings(**ENDPOINT), "judge", tasks(VALIDATED))


def test_a_judge_that_only_harnesses_ask_is_no_idle_one(caplog: pytest.LogCaptureFixture) -> None:
    assert plan_judge(settings(**ENDPOINT), "score", tasks(VALIDATED), is_told_to_agents=True) is None
    assert caplog.text == ""


def test_without_a_calibration_the_judge_is_warned_of_and_with_a_least_precision_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate(judge(), tmp_path, None)
    assert "expected a calibration of judge 'judge-1'" in caplog.text
    assert "recipes.calibrate_judge" in caplog.text

    with pytest.raises(ConfigError, match=r"precision of at least 0\.9.*calibrate_judge.*min_precision out"):
        gate(judge(), tmp_path, 0.9)


def test_the_lower_end_of_the_interval_must_reach_the_least_precision(tmp_path: Path) -> None:
    calibrate(judge(), tmp_path, right=95, wrong=5, refused=995)  # 0.95, corrected by 0.4 of half a trial

    gate(judge(), tmp_path, None)
    gate(judge(), tmp_path, 0.88)
    with pytest.raises(ConfigError, match=r"to begin at 0\.9 or above, got 0\.950 \(0\.886 to 0\.980\) from 1095"):
        gate(judge(), tmp_path, 0.9)


def test_a_judge_that_always_says_success_is_refused_however_good_the_recorded_policy_was(tmp_path: Path) -> None:
    calibrate(judge(), tmp_path, right=980, wrong=20, refused=0)  # precision 0.98, and 1 / (1 + 1) at half

    with pytest.raises(ConfigError, match=r"precision with as many failures as successes .* got 0\.500 \(0\.499 to"):
        gate(judge(), tmp_path, 0.9)


def test_a_judge_that_never_says_success_has_no_precision(tmp_path: Path) -> None:
    calibrate(judge(), tmp_path, right=0, wrong=0, refused=9)

    with pytest.raises(ConfigError, match="got no verdict 'success'"):
        gate(judge(), tmp_path, 0.5)


def test_the_calibration_of_another_judge_does_not_count(tmp_path: Path) -> None:
    calibrate(judge(), tmp_path, right=100, wrong=0, refused=100)
    record = str(calibration_path(judge(), str(tmp_path)))

    with pytest.raises(ConfigError, match="expected a calibration"):
        gate(judge(judge_votes=3), tmp_path, 0.9)
    with pytest.raises(ConfigError, match="got one of another judge"):
        gate(judge(judge_votes=3), tmp_path, 0.9, calibration=record)
    gate(judge(), tmp_path, 0.9, calibration=record)


@pytest.mark.parametrize("text", [None, "", "[]", '{"all": {}}'])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "record.json").write_text(text)
    with pytest.raises(ConfigError, match="judge_calibration: expected a file that recipes"):
        load_calibration(tmp_path / "record.json")


def test_a_prompt_of_ones_own_must_ask_for_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text('Answer {"success": ..., "reason": ...}.')
    (tmp_path / "poem.txt").write_text("Roses are red.")

    assert judge(judge_prompt=str(tmp_path / "mine.txt")).prompt_text.startswith("Answer")
    with pytest.raises(ConfigError, match='JSON object with "success" and "reason"'):
        judge(judge_prompt=str(tmp_path / "poem.txt"))
    with pytest.raises(ConfigError, match=r"judge\.prompt: expected a text file"):
        judge(judge_prompt=str(tmp_path / "none.txt"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["reward=judge"], "expected judge.base_url and judge.model with reward=judge"),
        (["judge_model=m"], "judge.base_url: expected it beside judge.model"),
        (["judge_base_url=http://h/v1"], "judge.model: expected it beside judge.base_url"),
        (["judge_votes=2"], "judge.votes: expected an odd number"),
        (["judge_input_price=1"], "judge.output_price: expected it beside judge.input_price"),
        (['judge_extra={"api_key": "sk-1"}'], "judge.extra: expected no secrets"),
        (['judge_extra={"headers": {"Authorization": "Bearer sk-1"}}'], "got 'Authorization'"),
        (['judge_extra={"messages": []}'], "judge.extra: expected fields beside those"),
        (["judge_base_url=http://me:sk-1@h/v1", "judge_model=m"], "judge.base_url: expected an address without"),
        (["judge_min_precision=1.5"], "judge.min_precision: expected a number above 0"),
        (["judge_base_url=judge:80", "judge_model=m"], "judge.base_url: expected an address"),
        ([f"tasks={json.dumps(JUDGED)}"], "let a judge decide"),
        (
            ["judge_base_url=http://127.0.0.1:9/v1", "judge_model=m", "judge=compare"],
            "judge.base_url: expected an endpoint that can be reached",
        ),
    ],
)
def test_a_judge_that_cannot_work_is_refused_before_anything_loads(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, f"log_path={tmp_path}/run", "dry_run=true"]) == 2
    error = capsys.readouterr().err.replace("\n    ", ", ")
    assert says in error
    assert "sk-1" not in error


def test_fields_that_only_sound_like_secrets_are_sent_to_the_judge() -> None:
    extra = {"max_tokens": 200, "stop_token_ids": [1], "prompt_cache_key": "run", "temperature": 0.5}
    assert judge(judge_extra=extra).extra == extra


async def test_a_dry_run_of_judged_tasks_asks_whether_the_judge_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cua_rl.recipes.train import cli_main

    endpoint = JudgeEndpoint(lambda asked: verdict(True))
    async with serve_judge(endpoint) as url:
        config = CLIConfig(
            judge=JudgeConfig(base_url=url, model=MODEL),
            reward="judge",
            tasks=JUDGED,
            eval_tasks=None,
            dry_run=True,
            log_path=str(tmp_path / "run"),
        )
        monkeypatch.delenv("JUDGE_API_KEY", raising=False)
        with pytest.raises(ConfigError, match="JUDGE_API_KEY: expected a key"):
            await cli_main(config)
        monkeypatch.setenv("JUDGE_API_KEY", KEY)
        await cli_main(config)

    shown = capsys.readouterr().out
    assert json.loads(shown)["judge_fingerprint"] == judge(judge_base_url=url).fingerprint
    assert KEY not in shown
    assert endpoint.num_requests == 0
