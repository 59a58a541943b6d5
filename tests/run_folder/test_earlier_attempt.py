"""With which settings a resumed run goes on, what it refuses, and which results it compares."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cua_rl.environments.phone.demo.templates import DEMO_TRAINING
from cua_rl.recipes.sft import main as sft
from cua_rl.recipes.train import main as train
from cua_rl.reporting.json_lines import append_record, write_text
from cua_rl.rl.config import EvaluationSettings
from cua_rl.run.training import run_training
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.earlier_attempt import CHANGED, curve_at, find_earlier_attempt, how_to_go_on, settings_at
from cua_rl.run_folder.log_directory import prepare_log_directory
from cua_rl.run_folder.model_card import format_model_card
from cua_rl.types.errors import ConfigError

TASKS = '{"source_type": "demo_training", "category": "settings"}'
FIRST = ("group_size=3", "groups_per_batch=5", "num_eval_rollouts=8", f"tasks={TASKS}", "learning_rate=0.001")
RESUME = "behavior_if_log_dir_exists=resume"


def dry_run(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> tuple[dict[str, Any], str]:
    """The settings that a run with these options would have, and what it says beside."""
    assert train(["dry_run=true", "monitor=false", *options]) == status
    printed = capsys.readouterr()
    return json.loads(printed.out or "{}"), printed.err


def leave_run(folder: Path, settings: Mapping[str, Any], *checkpoints: int, last_step: int = 3) -> None:
    """The folder of a run that was killed after `last_step` steps."""
    folder.mkdir(exist_ok=True)
    write_text(folder / "config.json", json.dumps(settings))
    (folder / ".cua_rl.lock").touch()
    (folder / "metrics.jsonl").touch()
    for step in range(1, last_step + 1):
        append_record(folder / "metrics.jsonl", {"step": step, "progress/step": float(step)})
    for step in checkpoints:
        paths = {"state_path": f"weights/{step:06d}", "sampler_path": f"sampler_weights/{step:06d}"}
        for path in paths.values():
            (folder / path).mkdir(parents=True)
            (folder / path / "weights").write_text("numbers")
        append_record(folder / "checkpoints.jsonl", {"name": f"{step:06d}", "step": step, **paths})


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    settings, _ = dry_run(capsys, *FIRST, f"log_path={tmp_path / 'run'}")
    leave_run(tmp_path / "run", settings, 1, 2)
    return tmp_path / "run"


def test_a_resumed_run_has_the_settings_that_it_began_with(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((run / "config.json").read_text())

    now, said = dry_run(capsys, f"log_path={run}", RESUME, "max_steps=4")

    kept = ("tasks", "eval_tasks", "group_size", "groups_per_batch", "learning_rate", "evaluation", "tasks_sha256")
    assert {name: now[name] for name in kept} == {name: before[name] for name in kept}
    assert (now["group_size"], now["groups_per_batch"], now["evaluation"]["num_eval_rollouts"]) == (3, 5, 8)
    assert f"resumes {run} after step 2 (weights/000002); steps 3 to 3 are dropped and run again\n" in said
    assert "  max_steps=4, was 24\n" in said
    assert said.count(", was ") == 1


def test_a_run_resumed_from_python_keeps_what_is_not_given_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = EvaluationSettings(skip_baseline=True)
    config = CLIConfig(
        log_path=str(run), behavior_if_log_dir_exists="resume", dry_run=True, group_size=6, evaluation=evaluation
    )

    asyncio.run(run_training(config))

    now = json.loads(capsys.readouterr().out)
    assert (now["group_size"], now["groups_per_batch"], now["tasks"]) == (6, 5, json.loads(TASKS))
    assert (now["evaluation"]["skip_baseline"], now["evaluation"]["num_eval_rollouts"]) == (True, 8)


CURVES = [
    ("tasks.source_type=demo_training", "tasks: expected {'source_type': 'demo_training', 'category': 'settings'}"),
    ("eval_tasks=none", "eval_tasks: expected {'source_type': 'demo_eval', 'tags': ['demo']}"),
    ("num_eval_rollouts=64", "evaluation.num_eval_rollouts: expected 8 as when the run in"),
    ("seed=1", "seed: expected 0"),
    ("loss=cispo", "loss.name: expected 'importance_sampling'"),
    ("reward=completion", "reward: expected 'binary'"),
    ("advantages=leave_one_out", "advantages: expected 'mean_std'"),
    ("credit.discount=0.5", "credit.discount: expected 1.0"),
    ("max_turns=3", "max_turns: expected 20"),
    ("reward_clip=1", "reward_clip: expected None"),
    ("task_sampling=success_rate", "curriculum.task_sampling: expected 'uniform'"),
    ("gbox_mini_agent_agent=qwen3-vl", "agent.gbox_mini_agent_agent: expected 'mai-ui'"),
]


@pytest.mark.parametrize(("option", "words"), CURVES, ids=[option for option, _ in CURVES])
def test_a_run_goes_on_with_other_tasks_evaluations_or_loss_only_where_that_is_said(
    option: str, words: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, said = dry_run(capsys, f"log_path={run}", RESUME, option, status=2)
    assert words in said
    assert "resume_with=changes" in said

    now, _ = dry_run(capsys, f"log_path={run}", RESUME, option, "resume_with=changes")
    (entry,) = now[CHANGED]
    assert (entry["after_step"], entry["begins_curve"]) == (2, True)
    assert words.split(":")[0] in entry["settings"]


POLICIES = [
    ("lora_alpha=64", "trainer.lora_alpha: expected 32"),
    ("lora_rank=8", "lora_rank: expected 16"),
    ('lora_modules=["language","merger"]', "trainer.lora_modules: expected ['language']"),
]


@pytest.mark.parametrize(("option", "words"), POLICIES, ids=[option for option, _ in POLICIES])
def test_weights_are_not_resumed_as_another_policy_whatever_is_said(
    option: str, words: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, said = dry_run(capsys, f"log_path={run}", RESUME, option, "resume_with=changes", status=2)

    assert words in said


def test_a_run_without_a_checkpoint_begins_anew_with_whatever_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, _ = dry_run(capsys, *FIRST, f"log_path={tmp_path / 'run'}")
    leave_run(tmp_path / "run", settings, last_step=0)

    now, said = dry_run(capsys, f"log_path={tmp_path / 'run'}", RESUME, "seed=1", "lora_rank=8")

    assert (now["seed"], now["lora_rank"], now["group_size"], now[CHANGED]) == (1, 8, 3, [])
    assert "after step 0 (no checkpoint)" in said


def test_a_run_resumes_after_a_chosen_step_with_the_settings_of_that_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, _ = dry_run(capsys, f"log_path={run}", RESUME, "learning_rate=0.5", "seed=7", "resume_with=changes")
    leave_run(run, now, 4, last_step=5)
    changed = json.loads((run / "config.json").read_text())[CHANGED]

    now, said = dry_run(capsys, f"log_path={run}", RESUME, "resume_step=4")
    assert (now["learning_rate"], now["seed"], now[CHANGED]) == (0.5, 7, changed)
    now, said = dry_run(capsys, f"log_path={run}", RESUME, "resume_step=2")
    assert (now["learning_rate"], now["seed"], now[CHANGED]) == (0.5, 7, changed)  # its next step was trained with
    now, said = dry_run(capsys, f"log_path={run}", RESUME, "resume_step=1")
    assert (now["learning_rate"], now["seed"], now[CHANGED]) == (0.001, 0, [])
    assert "after step 1 (weights/000001); steps 2 to 5 are dropped and run again" in said

    _, said = dry_run(capsys, f"log_path={run}", RESUME, "resume_step=3", status=2)
    assert "one of [1, 2, 4]" in said
    _, said = dry_run(capsys, f"log_path={run.parent / 'nothing'}", RESUME, "resume_step=3", status=2)
    assert "resume_step: expected behavior_if_log_dir_exists=resume and the folder of a run" in said


def test_a_task_file_with_other_tasks_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "tasks.txt", tmp_path / "run"
    names = [template.task_id for template in DEMO_TRAINING]
    file.write_text(names[0])
    source = f'tasks={{"source_type": "file", "file_path": "{file}"}}'
    settings, _ = dry_run(capsys, source, "eval_tasks=none", f"log_path={run}")
    leave_run(run, settings, 2)
    file.write_text("\n".join(names[:2]))

    _, said = dry_run(capsys, f"log_path={run}", RESUME, status=2)

    assert "tasks_sha256: expected the same tasks as when the run in" in said


def test_the_settings_of_earlier_versions_and_of_a_moved_folder_are_understood(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = json.loads((run / "config.json").read_text())
    flat |= {"loss": "ppo", "kl_loss_coef": 0.25, "num_eval_rollouts": 8, "of_a_later_version": 7}
    flat["learning_rate_schedule"] = "gone"
    for name in ("evaluation", "checkpoints", "tasks_sha256"):
        del flat[name]
    write_text(run / "config.json", json.dumps(flat))
    moved = run.rename(run.parent / "moved")

    now, said = dry_run(capsys, f"log_path={moved}", RESUME)

    assert (now["loss"]["name"], now["loss"]["kl_loss_coef"], now["evaluation"]["num_eval_rollouts"]) == (
        "ppo",
        0.25,
        8,
    )
    assert (now["run_name"], now["log_path"]) == ("moved", str(moved))
    assert "learning_rate_schedule=linear, was gone" in said


def test_a_secret_that_is_not_stored_has_to_be_given_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = json.loads((run / "config.json").read_text())
    write_text(run / "config.json", json.dumps(stored | {"base_url": "http://***@server:8000"}))

    _, said = dry_run(capsys, f"log_path={run}", RESUME, status=2)

    assert "base_url: expected it again" in said


def test_a_run_goes_on_although_the_weights_that_it_began_with_are_gone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads((run / "config.json").read_text())
    write_text(run / "config.json", json.dumps(stored | {"load_checkpoint_path": "/gone/weights/000010"}))
    (run / "reference").mkdir()

    dry_run(capsys, f"log_path={run}", RESUME)

    _, said = dry_run(capsys, f"log_path={run}", RESUME, f"load_checkpoint_path={run}/weights/000001", status=2)
    assert "load_checkpoint_path: expected '/gone/weights/000010' as when the run in" in said


def test_checkpoints_without_the_settings_of_their_run_are_left_alone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.json").unlink()

    _, said = dry_run(capsys, f"log_path={run}", RESUME, status=2)

    assert "log_path: expected a run's settings in" in said


def test_a_run_of_another_recipe_is_not_resumed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sft([f"log_path={run}", RESUME, "dry_run=true"]) == 2
    assert "log_path: expected a run of recipes.sft to resume" in capsys.readouterr().err


def test_a_supervised_run_goes_on_with_its_own_settings_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("batch_size=4", "num_eval_conversations=2", "learning_rate=0.0005", f"log_path={tmp_path / 'run'}")
    assert sft([*small, "dry_run=true"]) == 0
    settings = json.loads(capsys.readouterr().out)
    leave_run(tmp_path / "run", settings, 2)

    assert sft([f"log_path={tmp_path / 'run'}", RESUME, "dry_run=true", "max_steps=7", "resume_step=2"]) == 0

    printed = capsys.readouterr()
    now = json.loads(printed.out)
    assert (now["batch_size"], now["num_eval_conversations"], now["learning_rate"]) == (4, 2, 0.0005)
    assert "after step 2 (weights/000002)" in printed.err
    assert sft([f"log_path={tmp_path / 'run'}", RESUME, "dry_run=true", "batch_size=5"]) == 2
    assert "batch_size: expected 4 as when the run in" in capsys.readouterr().err


CHANGES = [
    {"after_step": 2, "settings": {"learning_rate": [0.001, 0.5]}, "begins_curve": False},
    {"after_step": 4, "settings": {"tasks": ["old", "new"], "loss.name": ["ppo", "cispo"]}, "begins_curve": True},
]


def test_the_settings_and_the_curve_of_a_step_follow_from_what_was_changed_when() -> None:
    now = {"learning_rate": 0.5, "tasks": "new", "loss": {"name": "cispo"}, CHANGED: CHANGES}

    rates = [settings_at(now, step)["learning_rate"] for step in (1, 2, 3, 4, 5)]
    assert rates == [0.001, 0.001, 0.5, 0.5, 0.5]
    assert [settings_at(now, step)["loss"]["name"] for step in (4, 5)] == ["ppo", "cispo"]
    assert [settings_at(now, step)["tasks"] for step in (4, 5)] == ["old", "new"]
    curves = [curve_at(now, step) for step in (1, 4, 5, 9)]
    assert [(curve.number, curve.after_step) for curve in curves] == [(1, 0), (1, 0), (2, 4), (2, 4)]


def test_a_model_card_compares_within_the_curve_of_its_step(run: Path) -> None:
    settings = json.loads((run / "config.json").read_text())
    entry = {"after_step": 2, "settings": {"evaluation.num_eval_rollouts": [8, 64]}, "begins_curve": True}
    settings["evaluation"]["num_eval_rollouts"] = 64

    def evaluated(step: int, rate: float, num_rollouts: int, **curve: float) -> dict[str, float]:
        names = {"success_rate": rate, "success_rate_low": 0.0, "success_rate_high": 1.0, "num_rollouts": num_rollouts}
        return {"step": step, **{f"eval/held_out/{name}": value for name, value in names.items()}, **curve}

    other = {"progress/curve": 2.0}
    metrics = [
        evaluated(0, 0.1, 8),
        evaluated(2, 0.2, 8),
        evaluated(2, 0.3, 64, **other),
        evaluated(4, 0.4, 64, **other),
    ]

    def card(step: int) -> str:
        return format_model_card(
            settings | {CHANGED: [entry]},
            metrics,
            step=step,
            kind="adapter",
            dtype="float32",
            hub_base=None,
            rounding=0.0,
        )

    first, second = card(2), card(4)
    assert "before training (tasks: demo_eval) | success 10.0 % (95 % interval 0.0-100.0 %, 8 rollouts)" in first
    assert "this model (tasks: demo_eval) | success 20.0 %" in first
    assert "after step 2, when the tasks above began (tasks: demo_eval) | success 30.0 %" in second
    assert "this model (tasks: demo_eval) | success 40.0 % (95 % interval 0.0-100.0 %, 64 rollouts)" in second
    assert "after step 2: evaluation.num_eval_rollouts" in second
    assert "before training" not in second


def test_a_stopped_run_names_its_checkpoint_and_the_command_that_goes_on(run: Path) -> None:
    said = how_to_go_on(run, "train")
    assert said.startswith(f"the newest checkpoint is {run / 'weights' / '000002'}; continue with\n")
    assert said.endswith(f"-m cua_rl.recipes.train log_path={run} behavior_if_log_dir_exists=resume")
    (run / "weights" / "000002" / "weights").write_text("")  # half written
    assert "weights/000001" in how_to_go_on(run, "train")


def test_a_folder_in_use_is_refused_before_anything_is_planned(run: Path) -> None:
    with prepare_log_directory(run, "resume"), pytest.raises(ConfigError, match="expected log_path to be free"):
        find_earlier_attempt(run, "resume", None, "train")


DAMAGE = [
    ("config.json", "3"),
    ("config.json", '{"max_steps": 24, "group_size": 3, "changed": [{"after_step": "x"}]}'),
    ("checkpoints.jsonl", '{"step": 2}\n'),
    ("metrics.jsonl", '{"step": 1.5, "progress/step": 1.5}\n'),
]


@pytest.mark.parametrize(("name", "text"), DAMAGE)
def test_a_folder_that_no_run_of_this_version_wrote_is_refused_in_a_sentence(
    name: str, text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_text(text)

    _, said = dry_run(capsys, f"log_path={run}", RESUME, status=2)

    assert "log_path: expected a run" in said


def test_settings_of_a_newer_version_are_named_when_they_are_left_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((run / "config.json").read_text())
    write_text(run / "config.json", json.dumps(settings | {"entropy_floor": 0.2}))

    _, said = dry_run(capsys, f"log_path={run}", RESUME)

    assert "  entropy_floor=0.2 is left out: this version has no such setting\n" in said
