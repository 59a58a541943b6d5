"""Tasks in folders: <set>/<nn_name>/task.py and validator.py, with an optional pre_hook.py, on devices with a shell.

`task.py` has a function `create_task()`. What it returns has `name`, `description` and `get_validator()`, and may have
`get_pre_hook()`, `get_apk_config()`, `max_turns`, `difficulty`, `category` and `tags`. A validator's `validate(adb)` or
`validate(adb, answer)` says True or False; a pre-hook is a function `(adb)` or has `run(adb)`. Plain functions get an
`AdbClient` in a thread, `async def` functions get the `ShellDevice` itself.

Every folder is imported by itself, as a package: `from .validator import X` and `from ..config import Y` work.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_args

from cua_rl.errors import ConfigError, boundary
from cua_rl.tasks.fields import require_known
from cua_rl.tasks.folder_runs import ApkConfig, FolderParts, Hook, prepare_folder_task, validate_folder_task
from cua_rl.tasks.task import Category, Difficulty, Task, Template

DEFAULT_MAX_TURNS = 20
_NUMBERED = re.compile(r"\d+_\w")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask(Template):
    """One folder's task, <set>/<nn_name>; it is the same on every device, so it belongs to one side of a split only."""

    folder: Path
    instruction: str
    parts: FolderParts = field(compare=False)
    """Made anew at each load."""

    @property
    def set_name(self) -> str:
        return self.folder.parent.name

    def make_task(self, seed: int) -> Task:
        """The task; the seed tells instances apart, but the device is the same."""
        return self.build_task(
            seed,
            self.instruction,
            validate=partial(validate_folder_task, self.parts),
            prepare=partial(prepare_folder_task, self.parts),
        )


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
    package = _make_package(tasks_dir.parent if own else tasks_dir)
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


def _make_package(root: Path) -> ModuleType:
    """A package whose parts are the folders below `root`, forgotten and made anew at each load."""
    name = f"cua_rl_folder_tasks_{sha256(str(root).encode()).hexdigest()[:16]}"
    for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
        del sys.modules[known]
    importlib.invalidate_caches()
    package = ModuleType(name)
    package.__path__ = [str(root)]
    sys.modules[name] = package
    return package


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
    apk = _apk(_optional(definition, "get_apk_config", _nothing)())
    description = _text(definition, "description")
    guide = f"\n\n{apk.cua_guide}" if apk and apk.cua_guide else ""
    return FolderTask(
        task_id=task_id,
        folder=folder.resolve(),
        instruction=f"{description}{guide}",
        category=cast(Category, _choice(definition, "category", "app", get_args(Category))),
        difficulty=cast(Difficulty, _choice(definition, "difficulty", "medium", get_args(Difficulty))),
        max_turns=_max_turns(definition),
        tags=tuple(_optional(definition, "tags", ())),
        parts=FolderParts(
            task_id=task_id,
            validate=_validate(definition.get_validator()),
            pre_hook=_pre_hook(folder, definition),
            apk=apk,
        ),
    )


def _validate(validator: Any) -> Hook:
    if not callable(_optional(validator, "validate", None)):
        raise ConfigError(f"expected get_validator() to return something with validate(adb), got {validator!r}")
    return cast(Hook, validator.validate)


def _pre_hook(folder: Path, definition: Any) -> Hook | None:
    hook = _optional(definition, "get_pre_hook", _nothing)()
    if hook is None and (folder / "pre_hook.py").is_file():
        raise ConfigError("expected get_pre_hook() to return what pre_hook.py has, got nothing: it would never run")
    run = _optional(hook, "run", hook)
    if run is not None and not callable(run):
        raise ConfigError(
            f"expected get_pre_hook() to return a function (adb) or something with run(adb), got {hook!r}"
        )
    return cast(Hook | None, run)


def _apk(config: Any) -> ApkConfig | None:
    if config is None:
        return None
    return ApkConfig(
        app_name=str(_optional(config, "app_name", None) or ""),
        cua_guide=str(_optional(config, "cua_guide", None) or ""),
        requires_apk=bool(_optional(config, "requires_apk", False)),
        apk_url=str(_optional(config, "apk_url", None) or ""),
        package_name=str(_optional(config, "package_name", None) or ""),
        launch_after_install=bool(_optional(config, "launch_after_install", False)),
        main_activity=str(_optional(config, "main_activity", None) or ""),
    )


def _max_turns(definition: Any) -> int:
    value = _optional(definition, "max_turns", DEFAULT_MAX_TURNS)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"expected max_turns as a whole number of at least 1, got {value!r}")
    return value


def _text(definition: Any, name: str) -> str:
    value = _optional(definition, name, None)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"expected the task to have a {name} (text), got {value!r}")
    return value


def _choice(definition: Any, name: str, default: str, choices: Sequence[str]) -> str:
    value = str(_optional(definition, name, default))
    require_known(name, value, choices)
    return value


def _nothing() -> None:
    """What a task has that does not say otherwise."""


def _optional(thing: Any, name: str, default: Any) -> Any:
    """An attribute of an object that was written elsewhere, to whatever class."""
    return getattr(thing, name, default)
