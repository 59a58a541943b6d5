"""Tokenizers of runs, found by what their configurations say."""

import pytest

from cua_rl.monitor.token_texts import find_token_texts


@pytest.mark.parametrize("path", ["x" * 5000, "/tmp/\0", "/tmp/\ud800", "/dev/null"])
async def test_a_run_of_elsewhere_may_name_a_model_that_cannot_be_looked_for(path: str) -> None:
    assert await find_token_texts({"model_path": path, "model_name": "m"}) is None
