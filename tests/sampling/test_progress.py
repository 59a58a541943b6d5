"""A model server is judged by its tokens, not by the time that an answer takes."""

import asyncio
from collections.abc import Callable

import pytest

from cua_rl.run.rollouts import slow_answers
from cua_rl.sampling.load import ServerLoad
from cua_rl.sampling.progress import ServerStalled, wait_while_progressing
from tests.jumping_time import run_jumping

STALL_S = 120.0


def load(num_tokens: float, *, num_running: int = 1) -> ServerLoad:
    return ServerLoad(kv_cache_frac=0.1, num_waiting=0, num_running=num_running, num_tokens=int(num_tokens))


async def ask(answer_s: float, load_after: Callable[[float], ServerLoad | None]) -> float:
    """The time of an answer of at most 4,096 tokens from a server with this load."""
    begun = asyncio.get_running_loop().time()

    async def read_load() -> ServerLoad | None:
        return load_after(asyncio.get_running_loop().time() - begun)

    work = asyncio.sleep(answer_s)
    await wait_while_progressing(work, read_load, stall_timeout_s=STALL_S, max_tokens=4096)
    return asyncio.get_running_loop().time() - begun


def test_a_long_answer_is_waited_for_while_its_tokens_come() -> None:
    taken_s = run_jumping(ask(4096 / 12, lambda after_s: load(12 * after_s)))  # 341 s at 12 tokens a second
    assert taken_s == pytest.approx(341.3, abs=0.1)


def test_a_server_without_a_new_token_has_stalled() -> None:
    with pytest.raises(ServerStalled, match="got no token within 120 s"):
        run_jumping(ask(3600.0, lambda after_s: load(12 * min(after_s, 600.0))))


def test_a_server_that_reports_no_load_has_as_long_as_one_without_a_token() -> None:
    assert run_jumping(ask(119.0, lambda _: None)) == pytest.approx(119.0, abs=0.1)
    with pytest.raises(ServerStalled):
        run_jumping(ask(121.0, lambda _: None))


def test_a_request_is_lost_once_the_server_has_sampled_its_share_many_times() -> None:
    """Eight requests at 100 tokens a second: after 4 x 4,096 x 8 = 131,072 tokens this one must have had its turn."""
    with pytest.raises(ServerStalled, match="sampled 132000"):
        run_jumping(ask(86_400.0, lambda after_s: load(100 * after_s, num_running=8)))


def test_a_cancelled_rollout_cancels_its_request() -> None:
    async def run() -> bool:
        asked = asyncio.ensure_future(asyncio.sleep(3600.0))
        waiting = asyncio.create_task(
            wait_while_progressing(asked, lambda: asyncio.sleep(0, None), stall_timeout_s=STALL_S, max_tokens=1)
        )
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0)
        return asked.cancelled()

    assert run_jumping(run())


def test_the_longest_answer_is_compared_with_the_measured_speed() -> None:
    assert slow_answers(4096, 12.0, 341.4) is None
    said = slow_answers(4096, 12.0, 120.0) or ""
    assert said.startswith("max_tokens=4096 at 12 tokens/s takes 341 s, turn_timeout_s=120:")
    assert said.endswith("lower max_tokens to 1440, or raise turn_timeout_s to 342")
