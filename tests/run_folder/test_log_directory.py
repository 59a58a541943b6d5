"""The run's folder: who may use it, what survives a crash, what a resume finds."""

import json
import logging
import os
import pty
import signal
import struct
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from cua_rl.reporting.json_lines import append_record, read_records
from cua_rl.run_folder.log_directory import (
    Behavior,
    Checkpoint,
    Decision,
    LogDirectory,
    check_log_directory,
    load_settings,
    newest_checkpoint,
    prepare_log_directory,
)
from cua_rl.types.errors import ConfigError
from tests.patience import patience


def make_run(path: Path, *, num_steps: int = 0) -> None:
    with prepare_log_directory(path, "ask") as directory:
        directory.write_config({"group_size": 4})
        for step in range(1, num_steps + 1):
            append_record(directory.metrics_path, {"step": step, "reward/mean": 0.5})
            save(directory, step)


def save(directory: LogDirectory, step: int, *, is_interim: bool = False) -> None:
    for folder in (directory.state_path(step), directory.sampler_path(step)):
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(safetensors(8))
    state_path, sampler_path = directory.state_path(step), directory.sampler_path(step)
    directory.record_checkpoint(
        Checkpoint(step=step, state_path=state_path, sampler_path=sampler_path, is_interim=is_interim)
    )


def safetensors(num_bytes: int) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * num_bytes


def test_a_new_or_empty_folder_is_fresh_whatever_was_asked_for(tmp_path: Path) -> None:
    for behavior in ("ask", "overwrite", "skip", "resume"):
        with prepare_log_directory(tmp_path / behavior / "run", behavior) as directory:
            assert directory.decision is Decision.FRESH
            assert directory.metrics_path.read_text() == ""


def test_an_earlier_run_is_resumed_skipped_or_overwritten_as_asked(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=1)

    with prepare_log_directory(tmp_path, "skip") as directory:
        assert directory.decision is Decision.SKIP
    with prepare_log_directory(tmp_path, "resume") as directory:
        assert directory.decision is Decision.RESUME
        assert len(read_records(directory.metrics_path)) == 1
    with prepare_log_directory(tmp_path, "overwrite") as directory:
        assert directory.decision is Decision.FRESH
        assert sorted(path.name for path in tmp_path.iterdir()) == [".cua_rl.lock", "metrics.jsonl"]
        assert newest_checkpoint(directory.path) is None


def test_a_person_is_asked_and_may_change_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=1)
    questions: list[str] = []

    def answer_resume(question: str) -> str:
        questions.append(question)
        return "resume\n"

    with prepare_log_directory(tmp_path, "ask", ask=answer_resume) as directory:
        assert directory.decision is Decision.RESUME
    assert str(tmp_path) in questions[0]
    with pytest.raises(ConfigError, match="nothing was changed"):
        prepare_log_directory(tmp_path, "ask", ask=lambda _: "what?")
    assert (tmp_path / "config.json").exists()


def test_asking_without_a_terminal_names_the_other_values(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=1)

    with pytest.raises(ConfigError, match="behavior_if_log_dir_exists to overwrite, skip or resume"):
        prepare_log_directory(tmp_path, "ask")


@pytest.mark.parametrize("behavior", ["ask", "skip", "overwrite"])
def test_a_run_that_failed_before_its_first_figure_is_in_nobodys_way(tmp_path: Path, behavior: Behavior) -> None:
    make_run(tmp_path)
    (tmp_path / "logs").mkdir()

    check_log_directory(tmp_path, behavior)
    with prepare_log_directory(tmp_path, behavior) as directory:
        assert directory.decision is Decision.FRESH
        assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "attempts.jsonl", "checkpoints.jsonl", "outcomes.jsonl"])
def test_whatever_came_out_of_a_run_is_kept_until_somebody_decides(tmp_path: Path, name: str) -> None:
    make_run(tmp_path)
    (tmp_path / name).write_text("{}\n")

    with pytest.raises(ConfigError, match="which holds an earlier run"):
        prepare_log_directory(tmp_path, "ask")
    with prepare_log_directory(tmp_path, "skip") as directory:
        assert directory.decision is Decision.SKIP


def test_looking_at_a_folder_changes_nothing(tmp_path: Path) -> None:
    check_log_directory(tmp_path / "new" / "run", "ask")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="expected a folder that can be made"):
        check_log_directory(tmp_path / "file" / "run", "ask")


@pytest.mark.parametrize("behavior", ["ask", "overwrite", "skip", "resume"])
def test_a_folder_of_something_else_is_never_touched(tmp_path: Path, behavior: str) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(ConfigError, match="with other things in it"):
        prepare_log_directory(tmp_path, behavior)  # pyright: ignore[reportArgumentType]

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_checkout_is_never_taken_for_a_run(tmp_path: Path) -> None:
    for name in (".git", "config.json", "metrics.jsonl"):
        (tmp_path / name).touch()

    with pytest.raises(ConfigError, match="with other things in it"):
        prepare_log_directory(tmp_path, "overwrite")


def test_a_file_in_place_of_the_folder_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")

    with pytest.raises(ConfigError, match="run"):
        prepare_log_directory(tmp_path / "run", "overwrite")
    with pytest.raises(ConfigError, match="expected a folder that can be made"):
        prepare_log_directory(tmp_path / "run" / "inner", "overwrite")


@pytest.mark.parametrize("name", ["run\nWARNING alert run=other", "run\x1b[2J", "run\r"])
def test_a_run_is_not_named_by_what_would_break_a_line_of_a_log(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log_path: expected a path without line breaks and controls, got '.*\\"):
        check_log_directory(tmp_path / name, "resume")
    with pytest.raises(ConfigError, match="log_path"), prepare_log_directory(tmp_path / name, "resume"):
        pass


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    with prepare_log_directory(tmp_path, "ask"):
        with pytest.raises(ConfigError, match=r"which another run \(process \d+\) is using"):
            prepare_log_directory(tmp_path, "overwrite")
        with pytest.raises(ConfigError, match=rf"which another run \(process {os.getpid()}\) is using"):
            check_log_directory(tmp_path, "resume")

    with prepare_log_directory(tmp_path, "overwrite") as directory:
        assert directory.decision is Decision.FRESH
    check_log_directory(tmp_path, "overwrite")


def test_checkpoints_carry_their_step_in_their_folders(tmp_path: Path) -> None:
    with prepare_log_directory(tmp_path, "ask") as directory:
        assert directory.state_path(80) == tmp_path / "weights" / "000080"
        assert directory.sampler_path(80) == tmp_path / "sampler_weights" / "000080"
        save(directory, 80)

        record = read_records(directory.checkpoints_path)[0]

    assert record == {
        "name": "000080",
        "step": 80,
        "final": False,
        "interim": False,
        "state_path": "weights/000080",
        "sampler_path": "sampler_weights/000080",
    }


def test_a_moved_run_still_finds_its_checkpoints(tmp_path: Path) -> None:
    make_run(tmp_path / "before", num_steps=2)
    (tmp_path / "before").rename(tmp_path / "after")

    with prepare_log_directory(tmp_path / "after", "resume") as directory:
        checkpoint = newest_checkpoint(directory.path)

    assert checkpoint is not None
    assert checkpoint.step == 2
    assert checkpoint.state_path == tmp_path / "after" / "weights" / "000002"


def test_damaged_checkpoints_are_passed_over_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path, num_steps=5)
    (tmp_path / "weights/000005/adapter_model.safetensors").write_bytes(safetensors(5))
    (tmp_path / "weights/000004/adapter_model.safetensors").unlink()
    manifest = {"files": {"adapter_model.safetensors": sha256(b"another file").hexdigest()}}
    (tmp_path / "weights/000003/checkpoint.json").write_text(json.dumps(manifest))
    (tmp_path / "sampler_weights/000002/adapter_model.safetensors").write_bytes(b"")

    with prepare_log_directory(tmp_path, "resume") as directory, caplog.at_level(logging.WARNING):
        checkpoint = newest_checkpoint(directory.path)

    assert checkpoint is not None
    assert checkpoint.step == 1
    messages = [record.getMessage() for record in caplog.records]
    for step, words in ((5, "cut short"), (4, "is empty"), (3, "sha256"), (2, "is empty")):
        assert any(f"step={step}" in message and words in message for message in messages), (step, messages)


def test_a_checkpoint_that_matches_its_manifest_is_whole(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=1)
    folder = tmp_path / "weights/000001"
    digest = sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps({"files": {"adapter_model.safetensors": digest}}))

    with prepare_log_directory(tmp_path, "resume") as directory:
        checkpoint = newest_checkpoint(directory.path)

    assert checkpoint is not None


def test_a_line_cut_short_by_a_crash_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path, num_steps=1)
    with (tmp_path / "checkpoints.jsonl").open("a") as file:
        file.write('{"name": "0000')

    with prepare_log_directory(tmp_path, "resume") as directory:
        save(directory, 2)
        assert [checkpoint.step for checkpoint in directory.checkpoints()] == [1, 2]
    assert "line=2" in caplog.text


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=5)

    with prepare_log_directory(tmp_path, "resume") as directory:
        directory.truncate_after(3)

        assert [record["step"] for record in read_records(directory.metrics_path)] == [1, 2, 3]
        assert [checkpoint.step for checkpoint in directory.checkpoints()] == [1, 2, 3]


def test_the_newest_checkpoints_stay_and_those_that_were_asked_for(tmp_path: Path) -> None:
    with prepare_log_directory(tmp_path / "run", "ask") as directory:
        for step in range(1, 9):
            save(directory, step)

        assert directory.prune_checkpoints(2, keep_every=3) == [3, 6, 7, 8]

        assert [checkpoint.step for checkpoint in directory.checkpoints()] == [3, 6, 7, 8]
        assert sorted(path.name for path in (directory.path / "weights").iterdir()) == [
            "000003",
            "000006",
            "000007",
            "000008",
        ]
        assert directory.prune_checkpoints(0) == [3, 6, 7, 8]


def test_an_interim_checkpoint_stays_until_the_next_one_and_takes_the_place_of_none(tmp_path: Path) -> None:
    kept: list[int] = []
    with prepare_log_directory(tmp_path / "run", "ask") as directory:
        for step in range(1, 9):
            save(directory, step, is_interim=step % 3 > 0)

            kept = directory.prune_checkpoints(2, keep_every=2)

            assert kept[-1] == step
            assert newest_checkpoint(directory.path) == directory.checkpoints()[-1]
        # 2, 4 and 8 were never meant to last, so `keep_every` does not keep them
        assert kept == [3, 6, 8]
        assert sorted(path.name for path in (directory.path / "weights").iterdir()) == ["000003", "000006", "000008"]


def test_what_a_killed_attempt_left_beside_its_checkpoints_goes(tmp_path: Path) -> None:
    with prepare_log_directory(tmp_path / "run", "ask") as directory:
        for step in (1, 2, 3):
            save(directory, step)
        for step in (0, 4):
            directory.sampler_path(step).mkdir(parents=True)
        directory.state_path(3).with_name(".000003.partial-17").mkdir()  # killed while it wrote
        directory.truncate_after(2)

        directory.remove_strays(2, keep=[0])

        assert sorted(path.name for path in (directory.path / "sampler_weights").iterdir()) == [
            "000000",
            "000001",
            "000002",
        ]
        assert sorted(path.name for path in (directory.path / "weights").iterdir()) == ["000001", "000002"]


def test_an_adapter_that_was_being_replaced_when_its_writer_was_killed_comes_back(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "config.json").write_text("{}")
    for name in (".000010.replaced-7", ".000020.replaced-7", "000020"):
        (tmp_path / "sampler_weights" / name).mkdir(parents=True)

    with prepare_log_directory(tmp_path, "resume") as folder:
        assert folder.sampler_path(10).is_dir()
        folder.remove_strays(20, keep=[10, 20])

    assert sorted(path.name for path in (tmp_path / "sampler_weights").iterdir()) == ["000010", "000020"]


def test_what_was_half_written_when_a_tinker_service_was_killed_is_mended_in_the_folder_of_each_model(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text("{}")
    for name in (".end.replaced-7", ".half.replaced-7", ".half.partial-8", "half", ".new.partial-7"):
        (tmp_path / "weights" / "model.train.0" / name).mkdir(parents=True)

    with prepare_log_directory(tmp_path, "resume"):
        pass

    assert sorted(path.name for path in (tmp_path / "weights" / "model.train.0").iterdir()) == ["end", "half"]


def test_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        with prepare_log_directory(tmp_path / "run", "ask") as directory:
            (directory.path / "logs").mkdir()
            (directory.path / "logs" / "run.log").write_text("text")
            directory.write_config({})
        (tmp_path / "after").write_text("text")
    finally:
        os.umask(umask)

    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(paths) == 6
    assert [path for path in paths if path.stat().st_mode & 0o066] == []
    assert paths[0].stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "after").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_was_open_to_all_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)

    with prepare_log_directory(tmp_path / "run", "ask") as directory:
        assert directory.path.stat().st_mode & 0o777 == 0o700


def test_settings_that_were_cut_are_refused_by_the_name_of_what_points_at_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"learning_rate": ')
    with pytest.raises(ConfigError, match=r"from_run: expected a run's settings in .*config\.json.*JSONDecodeError"):
        load_settings(tmp_path, "from_run")


_ASKING = """
import sys
from pathlib import Path
import chz
from cua_rl.command_line.recipe import run_recipe
from cua_rl.run_folder.log_directory import choose_behavior

@chz.chz
class Config:
    pass

async def main(config):
    print(choose_behavior(Path(sys.argv[1]), "ask"), flush=True)

sys.exit(run_recipe(Config, main, []))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_recipe_that_waits_for_a_person_at_the_terminal(number: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    ours, terminal = pty.openpty()
    command = [sys.executable, "-c", _ASKING, str(tmp_path)]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    try:
        shown = b""
        while b"resume?" not in shown:
            shown += os.read(ours, 1000)
        process.send_signal(number)
        assert process.wait(timeout=patience(20.0)) == -number
    finally:
        process.kill()
        process.wait()
        os.close(ours)
