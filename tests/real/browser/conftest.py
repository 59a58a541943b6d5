"""Tests with a real Chromium; they are skipped where there is none."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cua_rl.errors import ConfigError

pytest.importorskip("playwright", reason="`make setup` installs Playwright")

from cua_rl.devices.browser.backend import BrowserPages
from cua_rl.devices.browser.chromium import find_chromium
from cua_rl.devices.browser.settings import PageSettings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        find_chromium()
    except ConfigError as error:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.fixture
async def pages(tmp_path: Path) -> AsyncIterator[BrowserPages]:
    """Pages of 400 x 300 that may show what lies in `tmp_path`."""
    settings = PageSettings(allowed_urls=(f"{tmp_path.as_uri()}/",), viewport_width=400, viewport_height=300, scale=1.5)
    async with BrowserPages(settings) as backend:
        yield backend
