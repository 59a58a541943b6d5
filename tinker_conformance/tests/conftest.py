"""The mini server for tests: one for all checks, whose mistakes are set over HTTP."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from mini_server import KEY, MODEL, PROGRAM

from tinker_conformance.server import Server

os.environ["HF_HUB_OFFLINE"] = "1"  # the mini server's model has no tokenizer to look for


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A right server, unless a test says otherwise."""
    process = subprocess.Popen([sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Server(base_url=f"http://127.0.0.1:{port}", api_key=KEY, model=MODEL)
    finally:
        process.kill()
        process.wait()
