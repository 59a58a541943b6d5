"""Trajectories of others: imported, trained on, exported and imported again with equal tokens and images."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from sqlalchemy import select

from cua_rl.database.models import Screenshot
from cua_rl.database.queries import latest_trainings
from cua_rl.database.rebuild import load_groups
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.export_trajectories import main as export_trajectories
from cua_rl.recipes.import_trajectories import main as import_trajectories
from cua_rl.recipes.sft import main as sft
from cua_rl.reporting.json_lines import read_records
from cua_rl.run_folder.recorded_run import open_run_database
from cua_rl.supervised.action_accuracy import ACTION_ACCURACY
from cua_rl.types.rollout import Rollout
from tests.exchange.files import adp, atif, write_android_control, write_images

pytest.importorskip("pyarrow", reason="`make setup` installs pyarrow")


async def read(folder: Path) -> tuple[list[Rollout], dict[str, bytes]]:
    """All rollouts of a run's steps, and its images by hash."""
    async with open_run_database(str(folder), {}) as (database, _), database.sessions() as session:
        (training,) = await latest_trainings(session, limit=2)
        assert (training.run_name, training.status) == (folder.name, "completed")
        rollouts = [
            rollout
            for step in range(1, training.num_completed_steps + 1)
            for group in await load_groups(session, training.id, step)
            for rollout in group.rollouts
        ]
        images = {row.sha256: row.data for row in await session.scalars(select(Screenshot))}
        return rollouts, images


def run(main: Callable[[Sequence[str]], int], *arguments: str) -> None:
    assert main(list(arguments)) == 0


def test_import_train_export_import(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    write_android_control(files)
    (files / "adp.json").write_text(json.dumps(adp(files)))
    another = json.dumps(adp(files)).replace("Book a flight.", "Book a hotel.")  # under the same id
    (files / "another.json").write_text(another)
    (files / "atif.json").write_text(json.dumps(atif(files)))
    imported = tmp_path / "imported"

    run(import_trajectories, f"path={files}", f"log_path={imported}")
    rollouts, images = asyncio.run(read(imported))
    assert sorted(rollout.task_id for rollout in rollouts) == [
        "adp/trek-1",
        "adp/trek-1#2",
        "android_control/7",
        "android_control/8",
        "atif/s1",
    ]

    small = ["max_steps=2", "batch_size=2", "num_eval_conversations=1", "num_threads=1", "learning_rate=0.002"]
    trained = tmp_path / "trained"
    run(sft, "data=rollouts", f"from_run={imported}", f"log_path={trained}", *small)
    losses = [
        record["loss/cross_entropy"]
        for record in read_records(trained / "metrics.jsonl")
        if "loss/cross_entropy" in record
    ]
    assert len(losses) == 2
    assert all(isinstance(loss, float) and 0 < loss < 100 for loss in losses)

    for kind in ("huggingface", "atif"):
        run(export_trajectories, f"run={imported}", f"out={tmp_path / kind}", f"format={kind}")
        run(import_trajectories, f"path={tmp_path / kind}", f"log_path={tmp_path / 'again' / kind}")
        again, its_images = asyncio.run(read(tmp_path / "again" / kind))
        assert again == rollouts  # every token, log-probability, version, reward and action
        assert its_images == images


def test_imitating_an_imported_set_raises_the_action_accuracy_on_held_out_steps(tmp_path: Path) -> None:
    names = write_images(tmp_path, 30)
    clicks = [{"action_type": "click", "x": x, "y": y} for x, y in ((96, 160), (48, 32))]
    episodes = [
        {"episode_id": number, "goal": "Open Mail.", "screenshots": names[place : place + 3], "actions": clicks}
        for number, place in enumerate(range(0, 30, 3))
    ]
    path, imported, trained = tmp_path / "episodes.jsonl", tmp_path / "imported", tmp_path / "trained"
    path.write_text("\n".join(map(json.dumps, episodes)))
    run(import_trajectories, f"path={path}", f"log_path={imported}", "samples=0")

    steps = ["max_steps=50", "batch_size=8", "eval_every=0", "save_every=0", "num_threads=1", "learning_rate=0.005"]
    held_out = ["num_eval_conversations=2", "num_eval_actions=100"]
    run(sft, "data=rollouts", f"from_run={imported}", f"log_path={trained}", *steps, *held_out)

    first, last = (record for record in read_records(trained / "metrics.jsonl") if ACTION_ACCURACY in record)
    assert (first["step"], last["step"]) == (0, 50)
    assert first["eval/held_out/num_actions"] == last["eval/held_out/num_actions"] == 6  # of each two clicks and an end
    summary: dict[str, float] = json.loads((trained / "summary.json").read_text())
    assert summary["last_held_out_loss"] < summary["first_held_out_loss"]
    assert summary["first_action_accuracy"] < summary["last_action_accuracy"] == 1
    assert [folder.name for folder in (trained / "evaluated").iterdir()] == ["000050"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["path=nowhere", "log_path=new"], "path: expected a file or folder with trajectories"),
        (["path={files}", "log_path=new"], "line 1: expected an action that is known"),
        (["path={files}", "log_path={files}"], "log_path: expected a folder that does not exist or is empty"),
        (["path={files}", "log_path=new", "model_name=/no/model"], "/no/model"),
        (["path=set", "log_path=new"], "run.json"),
    ],
)
def test_what_cannot_be_imported_is_refused_and_leaves_nothing(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    path = write_android_control(files)
    path.write_text(path.read_text().replace('"click"', '"teleport"'))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    status = import_trajectories([argument.format(files=files) for argument in arguments])

    assert status == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_unreadable_trajectories_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_android_control(tmp_path)
    path.write_text(path.read_text().replace('"click"', '"teleport"'))

    arguments = [f"path={path}", f"log_path={tmp_path / 'run'}", "unreadable=skip", f"model_name={TINY_QWEN3_VL}"]
    assert import_trajectories(arguments) == 0

    said = capsys.readouterr().out
    assert "1 of 2 trajectories imported" in said
    assert f"1 left out, unreadable: {path}, line 1: expected an action that is known" in said
    assert "1 rollout with 3 turns" in said
