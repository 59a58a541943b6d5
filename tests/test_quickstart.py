"""The examples that TASK_CONFIG_QUICKSTART.md refers to can be loaded; tests/documentation runs the page itself."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from cua_rl.environments.android.queries import ANDROID_QUERIES
from cua_rl.environments.phone.simulator.query_values import SIMULATOR_QUERIES
from cua_rl.environments.query_values import PHONE_QUERIES
from cua_rl.recipes.train import main

ROOT = Path(__file__).parents[1]


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


def test_the_table_of_queries_is_the_one_that_checks_are_read_by() -> None:
    page = (ROOT / "TASK_CONFIG_QUICKSTART.md").read_text()
    rows = ["| query | answers | example of `expected` | on |", "|---|---|---|---|"]
    for name, query in sorted(PHONE_QUERIES.items(), key=lambda entry: (entry[1].argument is not None, entry[0])):
        called = f"{name}:{query.argument.example}" if query.argument else name
        where = [
            place for place, known in (("simulator", SIMULATOR_QUERIES), ("adb", ANDROID_QUERIES)) if name in known
        ]
        example = json.dumps(query.values.example)
        rows.append(f"| `{called}` | {query.values.says} | `{example}` | {', '.join(where)} |")

    assert "\n".join(rows) in page, "put this table into TASK_CONFIG_QUICKSTART.md:\n" + "\n".join(rows)
