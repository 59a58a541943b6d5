from collections import deque
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.environments.device import Device
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.pool import DevicePool, DeviceRequest
from cua_rl.evaluation.openai_endpoint import Api, EndpointAccess, RemoteModel
from cua_rl.events import NoRecorder, RolloutSource
from cua_rl.host.http_server import serve_app
from cua_rl.judge.judge import may_use_proxy
from cua_rl.rewards.reward import binary_reward
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.task_loader import load_tasks
from cua_rl.types.rollout import Rollout, SamplingParams, StopReason
from tests.evaluation.fake_endpoint import GIVE_UP, KEY, TAP, FakeEndpoint

PARAMS = SamplingParams(max_tokens=64, temperature=0.5)


@pytest.fixture
def fake() -> FakeEndpoint:
    return FakeEndpoint()


@pytest_asyncio.fixture
async def url(fake: FakeEndpoint) -> AsyncGenerator[str]:
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as address:
        yield f"{address}/v1"


async def attempt(url: str, *, api: Api = "responses", key: str = KEY, **extra: object) -> Rollout:
    """One rollout of the agent on a simulated phone through the endpoint."""

    async def make_device(task: DeviceRequest) -> Device:
        return make_simulated_phone(task)

    (task,) = load_tasks({"source_type": "demo_eval"}, seed=0, split="eval").held_out(1)
    endpoint = RemoteModel(name="gpt", base_url=url, model="gpt", api=api, extra=extra)
    async with EndpointAccess(endpoint, key, PARAMS) as access:
        runner = RolloutRunner(
            devices=DevicePool(make_device, max_devices=1),
            gateway=access,
            agent=GBoxAgent(),
            reward=binary_reward,
            recorder=NoRecorder(),
            max_turns=3,
        )
        source = RolloutSource(phase="eval", step=0)
        plan = RolloutJob(source=source, group_id="g", group_index=0, member_index=0, task=task, params=PARAMS)
        return await runner.run(plan)


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_the_agent_works_through_either_api(fake: FakeEndpoint, url: str, api: Api) -> None:
    fake.arguments = deque([TAP, GIVE_UP])

    rollout = await attempt(url, api=api)

    assert (rollout.stop_reason, len(rollout.turns), rollout.success) == (StopReason.FINISHED, 2, False)
    assert rollout.turns[0].agent.action is not None
    assert '"coordinate": [500, 500]' in rollout.turns[0].model.text
    assert len(fake.requests) == 2
    assert KEY not in str(rollout)


async def test_an_endpoint_that_is_busy_is_asked_again(fake: FakeEndpoint, url: str) -> None:
    fake.failures = deque([(429, "rate_limited"), (500, "oops")])

    rollout = await attempt(url)

    assert rollout.stop_reason == StopReason.FINISHED
    assert len(fake.requests) == 3


async def test_a_conversation_that_is_too_long_is_the_policys_fault(fake: FakeEndpoint, url: str) -> None:
    fake.failures = deque([(400, "context_length_exceeded")])

    assert (await attempt(url)).stop_reason == StopReason.CONTEXT_OVERFLOW


async def test_a_wrong_key_is_a_fault_and_no_failure_of_the_model(url: str) -> None:
    rollout = await attempt(url, key="another-key")

    assert (rollout.stop_reason, rollout.reward) == (StopReason.SAMPLING_ERROR, None)
    assert rollout.error is not None
    assert "401" in rollout.error


async def test_extra_fields_are_set_and_none_takes_one_away(fake: FakeEndpoint, url: str) -> None:
    await attempt(url, api="chat", max_tokens=None, max_completion_tokens=99)

    assert "max_tokens" not in fake.requests[0]
    assert fake.requests[0]["max_completion_tokens"] == 99


def test_addresses_of_this_machine_are_known() -> None:
    assert not may_use_proxy("http://127.0.0.1:8000/v1")
    assert not may_use_proxy("http://localhost/v1")
    assert may_use_proxy("https://api.example.com/v1")
