"""A registry of Harbor's form with three tasks in a git repository, and what their verifiers pay for an answer."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.documentation.examples import ROOT

EXAMPLE = ROOT / "examples" / "harnesses" / "harbor"
DOUBLES = ROOT / "tests" / "doubles"
PYTHON = ROOT / ".harnesses" / "harbor" / "bin" / "python"
TASKS = {
    "hello": EXAMPLE / "tasks" / "hello",
    "vowels": EXAMPLE / "tasks" / "vowels",
    "length": DOUBLES / "harbor_tasks" / "length",
}
TRIAL: dict[str, Any] = {
    "agent": {"import_path": "answer_agent:AnswerAgent"},
    "environment": {"import_path": "process_environment:ProcessEnvironment"},
}


@contextmanager
def open_folder() -> Generator[Path]:
    """A folder in that of the project: programs in a sandbox have a `/tmp` of their own."""
    (ROOT / "build").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=ROOT / "build", prefix="harbor-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@contextmanager
def open_registry() -> Generator[str]:
    """The command that prints the rows of the data set `small`, whose tasks Harbor downloads from the repository."""
    with open_folder() as folder:
        yield _make_registry(folder)


def _make_registry(folder: Path) -> str:
    repository, registry = folder / "repository", folder / "registry.json"
    for name, path in TASKS.items():
        shutil.copytree(path, repository / name)
    git = ["git", "-C", str(repository), "-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=Tasks"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    where = {"git_url": repository.as_uri(), "git_commit_id": commit}
    entries = [{"name": name, "path": name, **where} for name in TASKS]
    registry.write_text(json.dumps([{"name": "small", "version": "1.0", "description": "Three.", "tasks": entries}]))
    dataset = {"name": "small", "version": "1.0", "registry_path": str(registry)}
    words = [str(PYTHON), str(EXAMPLE / "list_tasks.py"), str(folder / "tasks")]
    return shlex.join([*words, json.dumps({"dataset": dataset, **TRIAL})])


def reward_of(task_id: str, answer: str) -> float:
    """What the verifier of a task pays; `hello` wants another file than that of the answer."""
    match task_id:
        case "vowels":
            return len(set(answer) & set("aeiouy")) / 6
        case "length":
            return 1 / (3 + len(answer.rstrip("\n")))
        case _:
            return 0.0
