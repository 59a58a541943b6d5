"""The examples that TASK_CONFIG_QUICKSTART.md refers to can be loaded; tests/documentation runs the page itself."""

import json
import runpy
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from cua_rl.environments.android.queries import ANDROID_QUERIES
from cua_rl.environments.phone.demo.expert import decide
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator.device import perform
from cua_rl.environments.phone.simulator.queries import read_query
from cua_rl.environments.phone.simulator.query_values import SIMULATOR_QUERIES
from cua_rl.environments.query_values import PHONE_QUERIES, Query, Values
from cua_rl.recipes.train import main
from cua_rl.types.actions import Finish

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


def values_seen() -> Mapping[str, Counter[str]]:
    """What each query answers while scripted experts solve every demo task once; how often is its count."""
    seen = {name: Counter[str]() for name in SIMULATOR_QUERIES}
    for seed, template in enumerate(TEMPLATES.values()):
        phone = make_simulated_phone(template.make_task(seed))
        states = [phone.state]
        while (
            not isinstance((decision := decide(template, phone)).action, Finish) and len(states) <= template.max_turns
        ):
            phone.state = perform(phone.state, decision.action, phone.scale)
            states.append(phone.state)
        goal = template.instance(seed).goal.query
        for name, query in SIMULATOR_QUERIES.items():
            called = goal if goal.partition(":")[0] == name else query_called(name, query)
            seen[name].update(read_query(state, called) for state in states)
    return seen


def query_called(name: str, query: Query) -> str:
    return f"{name}:{query.argument.example}" if query.argument else name


def shown(value: str, values: Values) -> str:
    """As a check writes it, at most 60 characters of it."""
    is_json = not isinstance(values.example, str) and value not in ("", "untouched")
    text = value if is_json else json.dumps(value)
    if "=" in text:  # in a code span it would be a setting to copy
        return text
    return f"`{text}`" if len(text) <= 60 else f"`{text[:56]}`..."


def test_the_table_of_queries_is_what_checks_and_phones_say() -> None:
    page = (ROOT / "TASK_CONFIG_QUICKSTART.md").read_text()
    rows = ["| query | value | seen on simulated phones | on |", "|---|---|---|---|"]
    seen = values_seen()
    for name, query in sorted(PHONE_QUERIES.items(), key=lambda entry: (entry[1].argument is not None, entry[0])):
        where = [
            place for place, known in (("simulator", SIMULATOR_QUERIES), ("adb", ANDROID_QUERIES)) if name in known
        ]
        often = sorted(seen.get(name, Counter[str]()).items(), key=lambda entry: (-entry[1], entry[0]))
        unseen = f"(`{json.dumps(query.values.example)}`)"
        examples = [shown(value, query.values) for value, _ in often[:3]] or [unseen]
        values = ", ".join(examples[:1] if examples[0].endswith("...") else examples)
        called = query_called(name, query)
        rows.append(f"| `{called}` | {query.values.says} | {values} | {', '.join(where)} |")

    assert "\n".join(rows) in page, "put this table into TASK_CONFIG_QUICKSTART.md:\n" + "\n".join(rows)
