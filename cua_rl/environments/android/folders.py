"""Tasks in folders: <set>/<nn_name>/task.py and validator.py, with an optional pre_hook.py, on devices with a shell.

`task.py` has a function `create_task()`. What it returns has `name`, `description` and `get_validator()`, and may have
`get_pre_hook()`, `get_apk_config()`, `max_turns`, `difficulty`, `category` and `tags`. A validator's `validate(adb)` or
`validate(adb, answer)` says True or False; a pre-hook is a function `(adb)` or has `run(adb)`. Plain functions get an
`AdbClient` in a thread, `async def` functions get the `ShellDevice` itself.

Every folder is imported by itself, as a package: `from .validator import X` and `from ..config import Y` work.
"""

import asyncio
import importlib
import inspect
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any, cast, get_args

from cua_rl.environments.contract import Loading, SplitSource
from cua_rl.environments.device import AppDevice, Device, ShellDevice
from cua_rl.tasks.adb_client import AdbClient
from cua_rl.tasks.fields import Fields, given, require_known
from cua_rl.tasks.task import Category, Difficulty, Task, Template
from cua_rl.types.errors import CheckError, ConfigError, TaskError, boundary
from cua_rl.types.judgement import Validation

Hook = Callable[..., Any]
"""A function of a folder, plain or async: (adb) or (adb, answer)."""

_GO_HOME = "input keyevent KEYCODE_WAKEUP; wm dismiss-keyguard; input keyevent KEYCODE_HOME"


DEFAULT_MAX_TURNS = 20
_NUMBERED = re.compile(r"\d+_\w")


@dataclass(frozen=True, slots=True, kw_only=True)
class Apk:
    """The app that a task needs on the device."""

    cua_guide: str = ""
    """Added to the instruction after the task's description."""
    requires_apk: bool = False
    apk_url: str = ""
    package_name: str = ""
    launch_after_install: bool = False
    main_activity: str = ""


async def _prepare_app(task_id: str, apk: Apk, device: ShellDevice) -> None:
    package = apk.package_name
    if apk.requires_apk and not await _is_installed(package, device):
        if apk.apk_url and isinstance(device, AppDevice):
            await device.install_app(apk.apk_url)
        if not await _is_installed(package, device):
            origin = f" from {apk.apk_url}" if apk.apk_url else ""
            raise TaskError(
                f"expected {package!r} on the device for task {task_id!r}, got none; install it first{origin}"
            )
    if apk.launch_after_install and apk.main_activity:
        await device.shell(f"am start -n {quote(f'{package}/{apk.main_activity}')}")
    elif apk.launch_after_install:
        await device.shell(f"monkey -p {quote(package)} -c android.intent.category.LAUNCHER 1")


async def _is_installed(package: str, device: ShellDevice) -> bool:
    return f"package:{package}" in (await device.shell(f"pm list packages {quote(package)}")).split()


async def _call(hook: Hook, device: ShellDevice, *arguments: str) -> object:
    """Async functions run here and get the device; plain ones may block, so they run in a thread."""
    if inspect.iscoroutinefunction(hook):
        return await hook(device, *arguments)
    return await asyncio.to_thread(hook, AdbClient(device, asyncio.get_running_loop()), *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask(Template):
    """One folder's task, <set>/<nn_name>; it is the same on every device, so it belongs to one side of a split only."""

    folder: Path
    instruction: str
    # built at each load
    validator: Hook = field(compare=False)
    pre_hook: Hook | None = field(compare=False)
    apk: Apk | None = field(compare=False)

    @property
    def set_name(self) -> str:
        return self.folder.parent.name

    @property
    def categories(self) -> frozenset[str]:
        """Its category, and the name of its set."""
        return frozenset({self.category, self.set_name})

    def fixed_names(self, *, is_seeded: bool) -> frozenset[str]:
        """The path of its folder."""
        return frozenset({str(self.folder)})

    def make_task(self, seed: int) -> Task:
        """The task; the seed tells instances apart, but the device is the same."""
        return self.build_task(seed, self.instruction, validate=self._validate, prepare=self._prepare)

    async def _prepare(self, device: Device) -> None:
        """Go to the home screen, check the app, run the pre-hook, check that it is not done yet; raises `TaskError`."""
        shell = self._require_shell(device)
        if device.kind == "android":
            await shell.shell(_GO_HOME)
        if self.apk is not None:
            await _prepare_app(self.task_id, self.apk, shell)
        if self.pre_hook is not None:
            await _call(self.pre_hook, shell)
        with boundary(CheckError, f"validate {self.task_id!r}"):
            is_done = await self._is_valid(shell, answer=None)
        if is_done:
            raise TaskError(
                f"expected task {self.task_id!r} to be undone when it begins, got a validator that already returns "
                "True; add a pre-hook that undoes it"
            )

    async def _validate(self, device: Device, answer: str | None) -> Validation:
        started = time.monotonic()
        success = await self._is_valid(self._require_shell(device), answer)
        return Validation(
            query=f"{self.task_id}/validator.py",
            expected="true",
            actual="true" if success else "false",
            success=success,
            duration_s=time.monotonic() - started,
        )

    async def _is_valid(self, device: ShellDevice, answer: str | None) -> bool:
        takes_answer = len(inspect.signature(self.validator).parameters) > 1
        outcome = await _call(self.validator, device, *([answer or ""] if takes_answer else []))
        if not isinstance(outcome, bool):
            raise CheckError(
                f"expected True or False from the validator of {self.task_id!r}, got {outcome!r}; return one"
            )
        return outcome

    def _require_shell(self, device: Device) -> ShellDevice:
        if not isinstance(device, ShellDevice):
            raise TaskError(
                f"expected a device with a shell for task {self.task_id!r}, got {device.device_id!r}; use an "
                "Android device"
            )
        return device


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource(SplitSource):
    """Folders <set>/<nn_name> with task.py and validator.py, or one such set."""

    source_types = ("task_adapter",)
    required = "tasks_dir"

    tasks_dir: str | None = given(Fields.text)
    category: str | None = given(Fields.text)
    """A category or the name of a set, which are known only once the folders are read."""

    def load(self, loading: Loading) -> list[FolderTask]:
        if not loading.device.has_shell:
            raise ConfigError(
                f"expected a device with a shell for source_type 'task_adapter', got {loading.device.name}: validators "
                "in folders run commands on an Android device; choose such a device, or custom tasks"
            )
        tasks = load_folder_tasks(Path(self.tasks_dir or ""))
        if self.category is not None:
            known = dict.fromkeys([task.set_name for task in tasks] + [task.category for task in tasks])
            require_known("set or category of task folders", self.category, known)
        return self.take_side(tasks, loading.seed)


def load_folder_tasks(tasks_dir: Path) -> list[FolderTask]:
    """All tasks below a folder of sets (or in one set), sorted by id.

    Raises:
        ConfigError: names each folder that cannot be loaded.
    """
    tasks_dir = tasks_dir.expanduser().absolute()
    if not tasks_dir.is_dir():
        raise ConfigError(f"expected a folder of tasks at {str(tasks_dir)!r}, got none; check tasks_dir")
    own = _task_folders(tasks_dir)
    folders = own or [folder for task_set in _subfolders(tasks_dir) for folder in _task_folders(task_set)]
    if not folders:
        raise ConfigError(
            f"expected folders <set>/<nn_name> with task.py and validator.py in {str(tasks_dir)!r}, got none; "
            "check tasks_dir"
        )
    root = tasks_dir.parent if own else tasks_dir
    package = ModuleType(f"cua_rl_folder_tasks_{sha256(str(root).encode()).hexdigest()[:16]}")
    package.__path__ = [str(root)]
    for known in [name for name in sys.modules if f"{name}.".startswith(f"{package.__name__}.")]:
        del sys.modules[known]  # the folders are imported again at each load
    importlib.invalidate_caches()
    sys.modules[package.__name__] = package
    tasks: list[FolderTask] = []
    complaints: list[str] = []
    for folder in folders:
        try:
            tasks.append(_load(folder, package))
        except ConfigError as error:
            complaints.append(f"{folder.parent.name}/{folder.name}: {error}")
    if complaints:
        raise ConfigError(
            f"expected {len(folders)} task folders in {str(tasks_dir)!r} to load, got {len(complaints)} that do not; "
            "repair or remove\n  " + "\n  ".join(complaints)
        )
    return tasks


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))


def _task_folders(folder: Path) -> list[Path]:
    """A folder is meant to be a task if it is numbered or has task.py."""
    return [path for path in _subfolders(folder) if _NUMBERED.match(path.name) or (path / "task.py").is_file()]


def _load(folder: Path, package: ModuleType) -> FolderTask:
    for needed in ("task.py", "validator.py"):
        if not (folder / needed).is_file():
            raise ConfigError(f"expected {needed}, got none")
    if "." in folder.name or "." in folder.parent.name:
        raise ConfigError("expected a folder's name without dots, because it is imported; rename it")
    with boundary(ConfigError, "importing task.py (write `from .validator import ...` for what lies beside it)"):
        module: Any = importlib.import_module(f"{package.__name__}.{folder.parent.name}.{folder.name}.task")
    with boundary(ConfigError, "calling create_task()"):
        return _read_definition(folder, module.create_task())


def _read_definition(folder: Path, definition: Any) -> FolderTask:
    task_id = f"{folder.parent.name}/{folder.name}"
    config = _optional(definition, "get_apk_config", _nothing)()
    given: dict[str, Any] = {
        # text or a truth value, as the default is
        name: type(default)(_optional(config, name, None) or default)
        for name, default in ((part.name, part.default) for part in fields(Apk))
    }
    apk = None if config is None else Apk(**given)
    validator = definition.get_validator()
    if not callable(_optional(validator, "validate", None)):
        raise ConfigError(f"expected get_validator() to return something with validate(adb), got {validator!r}")
    description = _optional(definition, "description", None)
    if not isinstance(description, str) or not description.strip():
        raise ConfigError(f"expected the task to have a description (text), got {description!r}")
    max_turns = _optional(definition, "max_turns", DEFAULT_MAX_TURNS)
    if not isinstance(max_turns, int) or max_turns < 1:
        raise ConfigError(f"expected max_turns as a whole number of at least 1, got {max_turns!r}")
    hook = _optional(definition, "get_pre_hook", _nothing)()
    if hook is None and (folder / "pre_hook.py").is_file():
        raise ConfigError("expected get_pre_hook() to return what pre_hook.py has, got nothing: it would never run")
    pre_hook = _optional(hook, "run", hook)
    if pre_hook is not None and not callable(pre_hook):
        raise ConfigError(
            f"expected get_pre_hook() to return a function (adb) or something with run(adb), got {hook!r}"
        )
    guide = f"\n\n{apk.cua_guide}" if apk and apk.cua_guide else ""
    return FolderTask(
        task_id=task_id,
        folder=folder.resolve(),
        instruction=f"{description}{guide}",
        category=cast(Category, _choice(definition, "category", "app", get_args(Category))),
        difficulty=cast(Difficulty, _choice(definition, "difficulty", "medium", get_args(Difficulty))),
        max_turns=max_turns,
        tags=tuple(_optional(definition, "tags", ())),
        validator=cast("Hook", validator.validate),
        pre_hook=cast("Hook | None", pre_hook),
        apk=apk,
    )


def _choice(definition: Any, name: str, default: str, choices: Sequence[str]) -> str:
    value = str(_optional(definition, name, default))
    require_known(name, value, choices)
    return value


def _nothing() -> None:
    """Defaults of a task."""


def _optional(thing: Any, name: str, default: Any) -> Any:
    """An attribute of an object of an unknown, user-defined class."""
    return getattr(thing, name, default)
