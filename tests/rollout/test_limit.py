import asyncio

import pytest

from cua_rl.rollout.limit import Pressure, RolloutLimit
from cua_rl.sampling.load import ServerLoad, fullest, parse_load

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 7.0
vllm:num_requests_waiting{engine="0",model_name="base"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="base"} 0.5
vllm:num_preemptions_total{engine="0",model_name="base"} 3.0
"""


def load(kv_cache_frac: float, num_waiting: int = 0, num_preemptions: int = 0) -> ServerLoad:
    return ServerLoad(
        kv_cache_frac=kv_cache_frac, num_waiting=num_waiting, num_running=1, num_preemptions=num_preemptions
    )


def test_the_load_is_read_off_the_servers_page_and_the_fullest_cache_counts() -> None:
    assert parse_load(PAGE) == ServerLoad(kv_cache_frac=0.5, num_waiting=2, num_running=7, num_preemptions=3)
    assert fullest([load(0.2, 1), load(0.9, 2)]) == ServerLoad(kv_cache_frac=0.9, num_waiting=3, num_running=2)
    with pytest.raises(ValueError, match="expected vLLM's metrics"):
        parse_load("<html>")


async def test_slots_go_to_those_who_wait_longest_and_come_back_from_the_cancelled() -> None:
    limit = RolloutLimit(largest=1)
    order: list[str] = []

    async def work(name: str) -> None:
        await limit.acquire()
        order.append(name)
        await asyncio.sleep(0)
        limit.release()

    tasks = [asyncio.create_task(work(name)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)

    assert order == ["a", "c", "d"]
    assert (limit.num_running, limit.num_waiting) == (0, 0)


async def test_a_rollout_that_runs_again_gets_the_next_slot() -> None:
    limit = RolloutLimit(largest=1)
    order: list[str] = []

    async def work(name: str) -> None:
        await limit.acquire(is_repeat=name == "again")
        order.append(name)
        await asyncio.sleep(0)
        limit.release()

    await asyncio.gather(*map(work, ("a", "b", "again")))

    assert order == ["a", "again", "b"]


async def test_a_full_cache_shrinks_the_limit_once_and_room_lets_it_grow_one_by_one() -> None:
    limit = RolloutLimit(largest=100, smallest=4)
    pressure = Pressure(limit)
    for _ in range(80):
        await limit.acquire()

    for _ in range(3):  # the second and third look see what the first one has not yet changed
        pressure.observe(load(0.97, num_waiting=5), 0.5)

    assert limit.allowed == 60  # three quarters of the 80 that ran
    for _ in range(20):
        limit.release()
    pressure.observe(load(0.9), 0.5)  # neither full nor roomy
    assert limit.allowed == 60
    for _ in range(2):
        pressure.observe(load(0.5), 0.5)
        await limit.acquire()
    assert limit.allowed == 62
    pressure.observe(load(0.5, num_preemptions=1), 0.5)
    assert limit.allowed == 46  # 0.75 * 62 = 46.5
    for _ in range(62 - 46):
        limit.release()
    pressure.observe(load(0.1, num_preemptions=1), 0.01)
    assert limit.allowed == 34  # 0.75 * 46 = 34.5: the machine's memory counts too


async def test_a_limit_that_nobody_reaches_does_not_grow() -> None:
    limit = RolloutLimit(largest=10)
    limit.shrink()
    allowed = limit.allowed

    limit.grow()

    assert limit.allowed == allowed


async def test_all_who_wait_can_be_cancelled_together_with_those_who_run() -> None:
    limit = RolloutLimit(largest=1)

    async def work() -> None:
        await limit.acquire()
        try:
            await asyncio.Event().wait()
        finally:
            limit.release()

    tasks = [asyncio.create_task(work()) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    assert [task.cancelled() for task in tasks] == [True] * 4
    assert (limit.num_running, limit.num_waiting) == (0, 0)
