"""Tasks on pages of the user's own: where they come from, what they check, and what is refused at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.environments.browser import check_function
from cua_rl.environments.browser.page_checks import Verdict, parse_verdict
from cua_rl.environments.browser.page_tasks import PAGE_BROWSER, PageSource, PageTask, allowed_urls
from cua_rl.environments.browser.settings import SiteProgram
from cua_rl.environments.contract import Split
from cua_rl.environments.table import parse_sources
from cua_rl.task_loader import TaskSet, load_tasks, require_disjoint
from cua_rl.types.errors import ConfigError, TaskError

EXAMPLE = Path(__file__).parents[3] / "examples" / "sites" / "shopping_list"
SITE: dict[str, object] = {
    "source_type": "page",
    "file_path": str(EXAMPLE),
    "site_command": "sh server.sh {port}",
    "reset": "POST /api/reset",
}


def load(source: dict[str, object], split: Split = "train") -> TaskSet:
    return load_tasks(source, seed=0, split=split, device=PAGE_BROWSER)


def pages(tasks: TaskSet) -> list[PageTask]:
    return [task for task in tasks.templates if isinstance(task, PageTask)]


def test_a_folder_with_tasks_needs_no_code() -> None:
    tasks = load(SITE)
    assert tasks.task_ids[:2] == ("shopping_list/tick_bread", "shopping_list/add_coffee")
    assert len(tasks.task_ids) == 5
    program = SiteProgram(command="sh server.sh {port}", folder=EXAMPLE, reset="POST /api/reset")
    assert {task.site for task in pages(tasks)} == {program}
    assert {task.url for task in pages(tasks)} == {"/"}
    assert tasks.batch(0, 1)[0].device_request().world == program
    assert load(SITE | {"difficulty": "medium"}).task_ids == ("shopping_list/more_eggs", "shopping_list/clear_done")
    assert load(SITE | {"tags": ["question"]}).task_ids == ("shopping_list/count_open",)
    assert load(SITE | {"task_names": ["add_coffee"]}).task_ids == ("shopping_list/add_coffee",)
    assert allowed_urls([source for source in parse_sources(SITE) if isinstance(source, PageSource)]) == ()


def test_one_file_is_split_between_training_and_evaluation() -> None:
    sides = [load(SITE | {"split_type": side, "train_ratio": 0.6}, side) for side in ("train", "eval")]
    require_disjoint(*sides)
    assert {task_id for side in sides for task_id in side.task_ids} == set(load(SITE).task_ids)
    assert all(side.task_ids for side in sides)


def test_suites_may_call_our_keys_id_and_verify_and_have_several_files(tmp_path: Path) -> None:
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "e1.py").write_text("def verify(server_url): return True, 'done'\n")
    task = {"id": "task_e1", "difficulty": "easy", "instruction": "Star it.", "verify": "checks/e1.py"}
    (tmp_path / "real-tasks.json").write_text(json.dumps([task]))
    (tmp_path / "more.json").write_text(json.dumps({"tasks": [task | {"id": "task_e2", "url": "/#/list"}]}))
    (tmp_path / "last.jsonl").write_text(json.dumps({key: task[key] for key in ("instruction", "verify")}))
    tasks = load(SITE | {"file_path": str(tmp_path)})
    name = tmp_path.name
    assert tasks.task_ids == (f"{name}/last_1", f"{name}/task_e2", f"{name}/task_e1")
    assert pages(tasks)[1].url == "/#/list"


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"site_command": "sh server.sh"}, "expected {port} in site_command"),
        ({"site_command": "no-such-program {port}"}, "expected site_command to begin with a program"),
        ({"site_command": "sh 'server {port}"}, "correct its quotes"),
        ({"reset": "POST api/reset"}, 'expected reset as a request such as "POST /api/reset"'),
        ({"reset": "no-such-program"}, "expected reset to begin with a program"),
        ({"site_command": None}, "expected reset beside site_command"),
        ({"file_path": "/no/such/folder"}, "expected a JSON file with tasks at '/no/such/folder'"),
        ({"pages": [{"instruction": "Look."}]}, "expected either pages or file_path .* got both"),
        ({"file_path": None}, "expected either pages or file_path .* got neither"),
    ],
)
def test_a_source_that_cannot_work_is_refused(changed: dict[str, object], complaint: str) -> None:
    source = {key: value for key, value in (SITE | changed).items() if value is not None}
    with pytest.raises(ConfigError, match=complaint):
        load(source)


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ({"check": "missing.py"}, "expected the check of task 1 of .* as a Python file below"),
        ({"check": "check.txt"}, "as a Python file below"),
        ({"check": "check.py:verfy"}, "did you mean 'verify'"),
        ({"check": "check.py:three"}, "expected three.url. or three.url, answer."),
        ({"check": "broken.py"}, "expected Python in"),
        ({"check": {"command": "no-such-program"}}, "to begin with a program"),
        ({"check": {"command": "sh x", "query": "url"}}, "expected a known key of the check"),
        ({"check": {"query": "bogus", "expected": "1"}}, "expected a known query"),
        ({"check": None}, "expected instruction and check"),
        ({"url": "http://127.0.0.1/"}, 'expected url in task 1 of .* as a path on the site, such as "/"'),
        ({"dificulty": "easy"}, "did you mean 'difficulty'"),
        ({"difficulty": "extreme"}, "expected a known difficulty"),
    ],
)
def test_a_task_that_cannot_work_is_refused(task: dict[str, object], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text("def verify(url): return True\ndef three(a, b, c): return True\n")
    (tmp_path / "broken.py").write_text("def verify(:\n")
    entry = {"instruction": "Do it.", "check": "check.py"} | task
    (tmp_path / "tasks.json").write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match=complaint):
        load(SITE | {"file_path": str(tmp_path / "tasks.json")})


@pytest.mark.parametrize(
    ("printed", "verdict"),
    [
        ("noise\ntrue\n", Verdict(success=True)),
        ("false", Verdict(success=False)),
        ("0.5", Verdict(success=False, score=0.5)),
        ("1", Verdict(success=True, score=1.0)),
        ('[false, "still there"]', Verdict(success=False, message="still there")),
        ('{"success": true, "score": 0.9}', Verdict(success=True, score=0.9)),
        # as JavaScript writes it: a line separator inside a string is no end of a line
        (
            'noise\n{"success": false, "message": "got a\u2028b\u0085"}',
            Verdict(success=False, message="got a\u2028b\x85"),
        ),
    ],
)
def test_checks_may_answer_in_several_ways(printed: str, verdict: Verdict) -> None:
    assert parse_verdict(printed, "check.py") == verdict


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "yes",
        "2",
        "null",
        "NaN",
        "[1, 2]",
        '{"success": 1}',
        '{"success": true, "score": 3}',
        "9" * 5000,
        "[" * 10**5,
    ],
)
def test_anything_else_is_a_fault_of_the_check(printed: str) -> None:
    with pytest.raises(TaskError, match=r"from the check 'check\.py'"):
        parse_verdict(printed, "check.py")


def test_a_check_gets_as_many_arguments_as_it_takes_by_position(tmp_path: Path) -> None:
    file = tmp_path / "check.py"
    environment = {"CUA_SITE_URL": "http://a", "CUA_ANSWER": "7"}
    for signature, told in (("url", "a"), ("url, answer", "7"), ("url, *, retries=3", "a"), ("url, answer=''", "7")):
        name = signature.partition(", *")[0].rpartition(", ")[2].partition("=")[0]
        file.write_text(f"def verify({signature}):\n    return {name}[-1]\n")
        command = [sys.executable, check_function.__file__, str(file), "verify"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == f'"{told}"'
