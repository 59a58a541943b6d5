"""The load of vLLM servers, from their Prometheus metrics."""

from collections.abc import Iterable
from dataclasses import dataclass

_KV_CACHE = "vllm:kv_cache_usage_perc"
_WAITING = "vllm:num_requests_waiting"
_RUNNING = "vllm:num_requests_running"
_PREEMPTIONS = "vllm:num_preemptions_total"
_SAMPLED, _READ = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The load of one or more servers at one moment."""

    kv_cache_frac: float
    """Share of the KV cache in use, 0 to 1."""
    num_waiting: int
    """Requests waiting for room in the KV cache."""
    num_running: int
    num_preemptions: int = 0
    """Preemptions since the server started."""
    num_tokens: int = 0
    """Tokens sampled since the server started."""
    num_prompt_tokens: int = 0
    """Tokens of prompts since then."""


def parse_load(page: str) -> ServerLoad:
    """Parse the metrics page: requests summed over the engines of the server, and the fullest KV cache.

    Raises:
        ValueError: the page does not come from vLLM.
    """
    values: dict[str, list[float]] = {}
    for line in page.splitlines():
        name, _, rest = line.partition("{")
        if rest and not line.startswith("#"):
            values.setdefault(name, []).append(float(rest.rpartition("} ")[2]))
    missing = [name for name in (_KV_CACHE, _WAITING, _RUNNING) if name not in values]
    if missing:
        raise ValueError(f"expected vLLM's metrics, got a page without {missing!r}")
    return ServerLoad(
        kv_cache_frac=max(values[_KV_CACHE]),
        num_waiting=round(sum(values[_WAITING])),
        num_running=round(sum(values[_RUNNING])),
        num_preemptions=round(sum(values.get(_PREEMPTIONS, [0.0]))),
        num_tokens=round(sum(values.get(_SAMPLED, [0.0]))),
        num_prompt_tokens=round(sum(values.get(_READ, [0.0]))),
    )


def fullest(loads: Iterable[ServerLoad]) -> ServerLoad:
    """The combined load of several replicas: the fullest KV cache, and the sum of their requests."""
    every = list(loads)
    return ServerLoad(
        kv_cache_frac=max(load.kv_cache_frac for load in every),
        num_waiting=sum(load.num_waiting for load in every),
        num_running=sum(load.num_running for load in every),
        num_preemptions=sum(load.num_preemptions for load in every),
        num_tokens=sum(load.num_tokens for load in every),
        num_prompt_tokens=sum(load.num_prompt_tokens for load in every),
    )
