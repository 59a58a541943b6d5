"""Options of vLLM's server, before the installed vLLM's own parser."""

import json
import subprocess
import sys

import pytest

from cua_rl.run.preflight import require_vllm_args
from cua_rl.types.errors import ConfigError

MANY = """
import contextlib, io, json, sys
from cua_rl.vllm_arguments import main

found = []
for options in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            status = main(options)
        except SystemExit as ended:
            status = ended.code
    found.append([status, said.getvalue().strip().rpartition("\\n")[2]])
print(json.dumps(found))
"""
"""Most of the time of a process is that of vLLM's imports."""


async def test_what_vllm_refuses_is_an_error_of_the_setting_in_its_own_words() -> None:
    vllm_args = "--max-num-batched-token 8192 --no-such-option"

    with pytest.raises(ConfigError) as refused:
        await require_vllm_args(vllm_args, "server.vllm_args")

    assert f"server.vllm_args: expected options of vLLM's server, got {vllm_args!r}" in str(refused.value)
    assert "vLLM says: vllm serve: error: unrecognized arguments: --no-such-option" in str(refused.value)


def test_vllm_itself_says_which_options_it_takes() -> None:
    options = (
        "--max-num-batched-tokens 8192 --mm-processor-cache-gb 8",
        "--max-num-batched-tokens many",
        "--api-key sesame",
        "--no-enable-prefix-caching",
    )
    command = [sys.executable, "-c", MANY, json.dumps([one.split() for one in options])]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    taken, no_number, key, cache = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert taken == [0, ""]
    assert no_number[0] == 2
    assert "argument --max-num-batched-tokens: invalid" in no_number[1]
    assert key == [2, "--api-key is set by the run; leave it out, and use VLLM_API_KEY"]
    assert cache[0] == 2
    assert "--enable-prefix-caching is set by the run" in cache[1]
