"""A pytest plugin: which tests run in one process with `--dist=loadgroup`.

Tests of one file share its fixtures, so they stay together. A model server takes 2 GiB until its process ends, so all
files that use a shared one make one group. pytest-xdist's own groups are marks that it appends to node ids, which
pytest 9.2 ignores (pytest-xdist issue 1386).
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]

_SHARED_SERVERS = ("server", "vllm")
"""Fixtures of tests/real that last for a whole session."""


class GroupScheduling(LoadScopeScheduling):
    """Distributes whole groups of files."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        return group_of_file(self._root / nodeid.partition("::")[0])


@cache
def group_of_file(path: Path) -> str:
    """The shared model server that a test of the file, or a fixture beside it, takes; otherwise the file itself."""
    conftest = path.with_name("conftest.py")
    texts = [file.read_text(encoding="utf-8") for file in (path, conftest) if "real" in file.parts and file.exists()]
    taken = set(re.findall(r"\b(\w+): VllmServer\b", "".join(texts)))
    return next((name for name in _SHARED_SERVERS if name in taken), str(path))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None
