"""Tests with a real Chromium; they are skipped where there is none."""

from pathlib import Path

import pytest

from cua_rl.types.errors import ConfigError

pytest.importorskip("playwright", reason="`make setup` installs Playwright")

from cua_rl.environments.browser.chromium import find_chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        find_chromium()
    except ConfigError as error:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(error)))
