"""A GBox server on a socket."""

from collections.abc import AsyncGenerator

import pytest_asyncio

from cua_rl.environments.gbox import service
from tests.doubles.gbox_service import GboxService, serve_gbox


@pytest_asyncio.fixture
async def gbox() -> AsyncGenerator[GboxService]:
    async with serve_gbox() as running:
        yield running


service.FIRST_PAUSE_S = 0.01  # the double is up again at once
