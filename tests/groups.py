"""Which tests of tests/real `make test` runs, and, as a pytest plugin, which run in one process.

With `--dist=loadgroup`, tests of one file share its fixtures, so they stay together. A model server takes 2 GiB until
its process ends, so all files that use a shared one make one group. pytest-xdist's own groups are marks that it appends
to node ids, which pytest 9.2 ignores (pytest-xdist issue 1386).

`python -m tests.groups` prints the tests of `PATHS`; with `--deselect`, options of pytest that leave them out.
"""

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]

from tests.not_tested import UNTIL

PATHS: Mapping[str, str] = {
    "a run is killed and resumed": (
        "end_to_end/test_demo_run.py::test_a_killed_run_resumes_where_its_checkpoint_was_and_leaves_no_orphans"
    ),
    "rollout workers of a run": (
        "end_to_end/test_rollout_workers.py::test_rollouts_of_a_killed_worker_run_again_once_and_the_record_is_whole"
    ),
    "model server and trainer agree": (
        "end_to_end/test_injected_faults.py::test_without_a_fault_sampler_and_trainer_agree"
    ),
    "an agent that is a program": (
        "agents/test_agents_train.py::test_an_example_agent_trains_one_step_unchanged[plain_openai]"
    ),
    "the trainer's process": "training/test_client.py::test_a_step_through_a_real_worker",
    "the database": "database/test_recorder.py::test_groups_are_rebuilt_bit_for_bit",
    "the Tinker service": (
        "tinker_service/test_restart.py::"
        "test_a_service_that_is_killed_after_any_request_goes_on_and_takes_no_step_twice[3]"
    ),
    "a page in a browser": "browser/test_browser_pages.py::test_mouse_actions_arrive_where_the_screenshot_shows_them",
    "a desktop": "desktop/test_desktops.py::test_an_editor_gets_clicks_keys_and_any_character",
    "pages of the monitor": "monitor_web/test_pages.py::test_every_page_shows_its_data_and_can_be_read_by_all",
}
"""The test in tests/real that stands for each part and path; `make test` runs these, `make test-all` all others too."""

LONGEST: Sequence[str] = (
    "server",
    "tests/real/sampling/test_replicas_on_nodes.py",
    "tests/real/training/test_nodes.py",
    "tests/real/test_cluster.py",
    "tests/real/end_to_end/test_families.py",
    "tests/real/tinker/test_our_service.py",
    "tests/real/training/test_ranks.py",
)
"""The groups that take minutes, roughly the longest first: one that begins last ends alone, while others wait."""

_ROOT = Path(__file__).parents[1]
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


def place_in_order(path: Path) -> tuple[int, str]:
    """Tests are begun in this order, with --dist=loadgroup by groups: the longest, those of tests/real, all others.

    Where time may run out, another order every time, so that it is not always the same groups that are left.
    """
    group = group_of_file(path).removeprefix(f"{_ROOT}/")
    if group in LONGEST:
        return LONGEST.index(group), ""
    drawn = hashlib.sha256(f"{os.environ[UNTIL]} {group}".encode()).hexdigest() if UNTIL in os.environ else ""
    return len(LONGEST) + ("real" not in path.parts), drawn


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


if __name__ == "__main__":
    before = "--deselect=" if "--deselect" in sys.argv else ""
    sys.stdout.writelines(f"{before}tests/real/{test}\n" for test in PATHS.values())
