"""The page about task sources is true: its files are written, its Python is executed, its commands are run."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from cua_rl.recipes.train import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "TASK_CONFIG_QUICKSTART.md"
BLOCK = re.compile(r"^```(?P<language>\w+)(?: file=(?P<file>\S+))?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The arguments of each command of a shell block."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if shlex.split(line, comments=True)]


def test_every_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("POSTGRES_HOST", raising=False)
    names: dict[str, object] = {"__name__": "quickstart"}
    num_run = {"file": 0, "python": 0, "bash": 0}

    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        text, place = block["text"], f"{PAGE.name} at character {block.start()}"
        kind = "file" if block["file"] else block["language"]
        num_run[kind] += 1
        if kind == "file":
            (tmp_path / block["file"]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block["file"]).write_text(text)
        elif kind == "python":
            exec(compile(text, place, "exec"), names)
        else:
            for command in commands(text):
                assert command[:4] == ["python", "-m", "cua_rl.recipes.train", "dry_run=true"]
                assert main(command[3:]) == 0, (command, capsys.readouterr().err)

    assert PAGE.read_text().count("```") == 2 * sum(num_run.values())
    assert min(num_run.values()) >= 3


def test_the_examples_list_their_tasks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["list_tasks.py"])
    runpy.run_path(str(ROOT / "examples" / "list_tasks.py"), run_name="__main__")

    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [
        "my_wifi_on",
        "my_quiet_phone",
        "my_battery_question",
        "train_01_open_settings",
        "files/01_create_folder",
        "settings/01_max_brightness",
        "settings/02_screen_timeout_5min",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tasks.source_type=file", f"tasks.file_path={ROOT / 'examples' / 'custom_tasks.jsonl'}"],
        ["tasks.source_type=file", f"tasks.file_path={ROOT / 'examples' / 'task_ids.txt'}"],
    ],
)
def test_the_examples_pass_a_dry_run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)

    assert main(["dry_run=true", *arguments]) == 0, capsys.readouterr().err
