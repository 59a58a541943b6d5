"""Options of vLLM's server, before the installed vLLM's own parser."""

import asyncio

from cua_rl.errors import ConfigError
from cua_rl.run.preflight import require_vllm_args


async def complaint(vllm_args: str) -> str:
    try:
        await require_vllm_args(vllm_args, "server.vllm_args")
    except ConfigError as error:
        return str(error)
    return ""


async def test_vllm_itself_says_which_options_it_takes() -> None:
    taken, unknown, no_number, key, cache = await asyncio.gather(
        complaint("--max-num-batched-tokens 8192 --mm-processor-cache-gb 8"),
        complaint("--max-num-batched-token 8192 --no-such-option"),
        complaint("--max-num-batched-tokens many"),
        complaint("--api-key sesame"),
        complaint("--no-enable-prefix-caching"),
    )

    assert taken == ""
    assert "of which vLLM says: vllm serve: error: unrecognized arguments: --no-such-option" in unknown
    assert "argument --max-num-batched-tokens: invalid" in no_number
    assert key.endswith("--api-key is set by the run; leave it out, and use VLLM_API_KEY")
    assert "--enable-prefix-caching is set by the run" in cache
