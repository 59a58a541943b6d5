"""Folders of tasks: what loads, what is refused by name, the split, and running hooks and validators on a shell."""

import asyncio
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cua_rl.environments.contract import Split, training_ids
from cua_rl.environments.device import DeviceAbilities
from cua_rl.task_loader import TaskSet, load_tasks, require_disjoint
from cua_rl.tasks.readiness import prepare, validate
from cua_rl.tasks.task import Task
from cua_rl.types.errors import ConfigError, DeviceError, TaskError
from tests.fakes import FakeDevice

REAL_PHONE = DeviceAbilities(name="a real phone", has_shell=True, is_seeded=False)
EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"

TASK = """
from .validator import Validator

class Task:
    name = "A task"
    description = "Do it."
    {more}
    def get_validator(self):
        return Validator()

def create_task():
    return Task()
"""
VALIDATOR = """
class Validator:
    def validate(self, adb):
        return adb.shell("settings get global wifi_on") == "1"
"""


@dataclass
class FakePhone(FakeDevice):
    """A shell with settings, folders and packages."""

    settings: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    packages: tuple[str, ...] = ()
    commands: list[str] = field(default_factory=list)

    async def shell(self, command: str) -> str:
        await asyncio.sleep(0)
        self.commands.append(command)
        return "".join(self._run(part.strip()) for part in command.split(";"))

    def _run(self, command: str) -> str:
        words = command.split()
        match words:
            case ["settings", "get", space, key]:
                return self.settings.get(f"{space} {key}", "null") + "\n"
            case ["settings", "put", space, key, value]:
                self.settings[f"{space} {key}"] = value
                return ""
            case ["test", "-e", path, *_]:
                return "yes\n" if path in self.paths else ""
            case ["rmdir", path]:
                self.paths.discard(path)
                return ""
            case ["pm", "list", "packages", wanted]:
                return "".join(f"package:{name}\n" for name in self.packages if wanted in name)
            case _:
                return ""


def write_task(root: Path, task_id: str, *, task: str = TASK, validator: str = VALIDATOR, more: str = "") -> Path:
    folder = root / task_id
    folder.mkdir(parents=True)
    (folder / "task.py").write_text(task.replace("{more}", more))
    (folder / "validator.py").write_text(validator)
    return folder


def load(root: Path, split: Split = "train", **more: object) -> TaskSet:
    source = {"source_type": "task_adapter", "tasks_dir": str(root), **more}
    return load_tasks(source, seed=0, split=split, device=REAL_PHONE)


def load_one(root: Path, *, validator: str = VALIDATOR, more: str = "") -> Task:
    write_task(root, "demo/01_one", validator=validator, more=more)
    return load(root).batch(0, 1)[0]


async def test_the_examples_begin_undone_and_are_judged_by_the_phone() -> None:
    phone = FakePhone(
        settings={"system screen_brightness": "255", "system screen_off_timeout": "300000"},
        paths={"/sdcard/Download/abc"},
    )
    tasks = {task.task_id: task for task in load(EXAMPLES).batch(0, 3)}

    for task in tasks.values():
        await prepare(task, phone)
        assert not (await validate(task, phone, "Done.")).success

    await phone.shell("settings put system screen_brightness 255; settings put system screen_off_timeout 300000")
    phone.paths.add("/sdcard/Download/abc")
    for task in tasks.values():
        assert (await validate(task, phone, None)).success
    assert tasks["settings/01_max_brightness"].instruction == "Set the screen brightness to maximum."
    assert tasks["files/01_create_folder"].category == "system"


def test_a_set_may_be_loaded_alone_and_has_the_same_ids(tmp_path: Path) -> None:
    for task_id in ("demo/01_one", "demo/02_two", "airbnb/01_one"):
        write_task(tmp_path, task_id)

    assert load(tmp_path).task_ids == ("airbnb/01_one", "demo/01_one", "demo/02_two")
    assert (
        load(tmp_path / "demo").task_ids == load(tmp_path, category="demo").task_ids == ("demo/01_one", "demo/02_two")
    )
    assert load(tmp_path, task_names="2,airbnb/01_one").task_ids == ("airbnb/01_one", "demo/02_two")
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        load(tmp_path, category="demos")
    with pytest.raises(ConfigError, match="did you mean '02_two'"):
        load(tmp_path, task_names="02_tow")


def test_folders_are_imported_apart_and_anew(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.py").write_text("LIMIT = 7\n")
    for number in (1, 2):
        text = f"from ..config import LIMIT\nNUMBER = {number}\n{TASK}".replace(
            'description = "Do it."', 'description = f"Do {NUMBER} of {LIMIT}."'
        )
        write_task(tmp_path, f"demo/0{number}_task", task=text)
    path_before = list(sys.path)

    told = sorted(task.instruction for task in load(tmp_path).batch(0, 2))

    assert told == ["Do 1 of 7.", "Do 2 of 7."]
    assert sys.path == path_before
    assert not {"task", "validator", "config"} & set(sys.modules)
    assert load(tmp_path) == load(tmp_path)
    edited = tmp_path / "demo" / "01_task" / "task.py"
    edited.write_text(edited.read_text().replace("Do {NUMBER} of", "Now do {NUMBER} out of"))
    assert "Now do 1 out of 7." in [task.instruction for task in load(tmp_path).batch(0, 2)]


def bad_folders() -> Iterable[tuple[str, str, str, str]]:
    """(task.py, validator.py, what the task has more, what the message says)."""
    yield "def create_task(:", VALIDATOR, "", "SyntaxError"
    yield "x = 1", VALIDATOR, "", "create_task"
    yield TASK, "y = 1", "", "cannot import name 'Validator'"
    yield TASK.replace(".validator", "validator"), VALIDATOR, "", "from .validator import"
    yield TASK, "class Validator: pass", "", "something with validate"
    yield TASK.replace('description = "Do it."', ""), VALIDATOR, "", "to have a description"
    yield TASK, VALIDATOR, "max_turns = 0", "max_turns as a whole number"
    yield TASK, VALIDATOR, 'category = "setings"', "did you mean 'settings'"
    yield TASK, VALIDATOR, "get_pre_hook = lambda self: 3", "got 3"


@pytest.mark.parametrize(("task", "validator", "more", "says"), list(bad_folders()))
def test_every_bad_folder_is_named(tmp_path: Path, task: str, validator: str, more: str, says: str) -> None:
    write_task(tmp_path, "demo/01_good")
    write_task(tmp_path, "demo/02_bad", task=task, validator=validator, more=more)
    (tmp_path / "demo" / "03_empty").mkdir()

    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        load(tmp_path)

    assert "demo/02_bad: " in str(caught.value)
    assert "demo/03_empty: expected task.py, got none" in str(caught.value)
    assert "01_good" not in str(caught.value)


def test_a_pre_hook_that_would_never_run_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "demo/01_one")
    (folder / "pre_hook.py").write_text("def run(adb): ...")

    with pytest.raises(ConfigError, match="it would never run"):
        load(tmp_path)


def test_places_without_tasks_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="check tasks_dir"):
            load(place)


def test_the_split_is_by_id_so_a_new_folder_moves_no_other(tmp_path: Path) -> None:
    for number in range(12):
        write_task(tmp_path, f"demo/{number:02}_task")
    before = {side: set(load(tmp_path, split_type=side).task_ids) for side in ("train", "eval")}
    write_task(tmp_path, "airbnb/00_first")
    after = {side: set(load(tmp_path, split_type=side).task_ids) for side in ("train", "eval")}

    assert before["train"] | before["eval"] == {f"demo/{number:02}_task" for number in range(12)}
    assert not before["train"] & before["eval"]
    assert before["train"]
    assert before["eval"]
    assert all(before[side] == after[side] - {"airbnb/00_first"} for side in ("train", "eval"))
    # filters come after the split and move nothing either
    assert set(load(tmp_path, split_type="eval", category="demo").task_ids) == before["eval"]


def test_the_share_of_the_split_is_the_train_ratio() -> None:
    tasks = [f"demo/{number}" for number in range(1000)]

    assert 760 < len(training_ids(tasks, seed=3, train_ratio=0.8)) < 840
    assert training_ids(tasks, 0, 1.0) == set(tasks)
    assert not training_ids(tasks, 0, 0.0)


def test_the_same_folder_for_training_and_evaluation_is_refused_by_name(tmp_path: Path) -> None:
    for number in range(12):
        write_task(tmp_path, f"demo/{number:02}_task")
    train, held_out = load(tmp_path, split_type="train"), load(tmp_path, "eval", split_type="eval")

    require_disjoint(train, held_out)
    with pytest.raises(ConfigError, match=f"in both, such as .*{held_out.task_ids[0]}"):
        require_disjoint(load(tmp_path), held_out)
    with pytest.raises(ConfigError, match="with the same"):
        require_disjoint(load(tmp_path, split_type="train", seed=7), held_out)
    assert replace(train, split="eval").held_out(3) is not None


async def test_a_task_that_is_done_before_it_begins_is_a_fault(tmp_path: Path) -> None:
    task = load_one(tmp_path)

    await prepare(task, FakePhone())
    with pytest.raises(TaskError, match="already returns True"):
        await prepare(task, FakePhone(settings={"global wifi_on": "1"}))


async def test_the_answer_reaches_validators_that_ask_for_it(tmp_path: Path) -> None:
    text = "class Validator:\n    def validate(self, adb, answer):\n        return '42' in answer\n"
    task = load_one(tmp_path, validator=text)

    await prepare(task, FakePhone())
    assert (await validate(task, FakePhone(), "It is 42.")).success
    assert not (await validate(task, FakePhone(), None)).success


async def test_a_validator_that_returns_no_truth_is_a_fault(tmp_path: Path) -> None:
    task = load_one(tmp_path, validator="class Validator:\n    def validate(self, adb): adb.shell('ls')\n")

    with pytest.raises(TaskError, match="expected True or False from the validator of 'demo/01_one', got None"):
        await validate(task, FakePhone(), None)


async def test_a_device_that_fails_under_a_validator_stays_a_device_error(tmp_path: Path) -> None:
    class BrokenPhone(FakePhone):
        async def shell(self, command: str) -> str:
            raise DeviceError("unplugged")

    with pytest.raises(DeviceError, match="unplugged"):
        await validate(load_one(tmp_path), BrokenPhone(), None)


async def test_a_device_without_shell_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="a device with a shell"):
        await validate(load_one(tmp_path), FakeDevice(), None)


async def test_an_app_that_a_task_needs_must_be_there_and_is_launched(tmp_path: Path) -> None:
    facts = "requires_apk=True, package_name='com.shop', launch_after_install=True, cua_guide='Swipe.'"
    task = load_one(tmp_path, more=f"get_apk_config = lambda self: type('Apk', (), dict({facts}))")
    phone = FakePhone(packages=("com.shop",))

    assert task.instruction == "Do it.\n\nSwipe."
    await prepare(task, phone)
    assert "KEYCODE_HOME" in phone.commands[0]
    assert any(command.startswith("monkey -p com.shop") for command in phone.commands)
    with pytest.raises(TaskError, match="install it first"):
        await prepare(task, FakePhone(packages=("com.shop.beta",)))


async def test_an_app_with_an_address_is_installed_on_devices_that_can(tmp_path: Path) -> None:
    class Installing(FakePhone):
        async def install_app(self, source: str) -> None:
            self.commands.append(f"install {source}")
            self.packages = ("com.shop",)

        async def open_app(self, package: str, activity: str = "") -> None:
            self.commands.append(f"open {package}")

    facts = "requires_apk=True, package_name='com.shop', apk_url='https://example.com/shop.apk'"
    phone = Installing()

    await prepare(load_one(tmp_path, more=f"get_apk_config = lambda self: type('Apk', (), dict({facts}))"), phone)

    assert "install https://example.com/shop.apk" in phone.commands
