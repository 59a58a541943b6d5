import asyncio
from pathlib import Path

import pytest

from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.sampling.canary import Canary, canary_datum, text_canary
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.replica import RequestRejected
from cua_rl.sampling.server import ExternalServer
from cua_rl.sampling.vllm_responses import RESPONSES_PATH
from cua_rl.types.errors import AdapterError, ConfigError, SamplingError
from cua_rl.types.rollout import AdapterRef
from tests.sampling.fake_vllm import FakeVllm

REQUEST = {"input": "hi", "max_output_tokens": 8}


def adapter(version: int, path: str = "adapter") -> AdapterRef:
    return AdapterRef(path=Path(path), policy_version=version)


def served_names(fake: FakeVllm) -> list[str]:
    return sorted(name.removesuffix("-run") for name in fake.adapters)


async def test_requests_go_to_the_base_model_until_an_adapter_is_published(
    client: SamplingClient, fake: FakeVllm
) -> None:
    _, before = await client.respond(RESPONSES_PATH, REQUEST)
    await client.publish(adapter(1))
    _, after = await client.respond(RESPONSES_PATH, REQUEST)
    assert [request["model"] for request in fake.requests] == ["base", "policy-000001-run"]
    assert (before, after) == (None, adapter(1))


async def test_publishing_unloads_the_adapter_before_if_nobody_uses_it(client: SamplingClient, fake: FakeVllm) -> None:
    for version in range(20):
        await client.publish(adapter(version))
    assert served_names(fake) == ["policy-000019"]
    assert client.replicas[0].loaded == (adapter(19),)


async def test_an_adapter_with_a_request_under_way_stays_loaded(client: SamplingClient, fake: FakeVllm) -> None:
    await client.publish(adapter(1))
    fake.gate = asyncio.Event()
    asking = asyncio.create_task(client.respond(RESPONSES_PATH, REQUEST))
    await fake.has_arrived.wait()
    await client.publish(adapter(2))
    assert served_names(fake) == ["policy-000001", "policy-000002"]
    fake.gate.set()
    assert (await asking)[1] == adapter(1)
    await client.publish(adapter(3))
    assert served_names(fake) == ["policy-000003"]


async def test_a_pinned_adapter_survives_publications_and_goes_after(client: SamplingClient, fake: FakeVllm) -> None:
    await client.publish(adapter(1))
    async with client.pinned(adapter(1)):
        await client.publish(adapter(2))
        await client.publish(adapter(3))
        assert served_names(fake) == ["policy-000001", "policy-000003"]
        _, used = await client.respond(RESPONSES_PATH, REQUEST, adapter=adapter(1))
        assert used == adapter(1)
    await client.publish(adapter(4))
    assert served_names(fake) == ["policy-000004"]


async def test_an_adapter_that_was_unloaded_is_loaded_again_when_it_is_pinned(
    client: SamplingClient, fake: FakeVllm
) -> None:
    await client.publish(adapter(1))
    await client.publish(adapter(2))
    async with client.pinned(adapter(1)):
        assert served_names(fake) == ["policy-000001", "policy-000002"]


async def test_an_adapter_that_changes_nothing_is_refused_and_the_one_before_stays(
    client: SamplingClient, fake: FakeVllm
) -> None:
    await client.publish(adapter(1))
    with pytest.raises(AdapterError, match="match no module"):
        await client.publish(adapter(2, "inert"), Canary(tokens=(1, 2, 3), changes_model=True))
    assert client.current == adapter(1)
    assert served_names(fake) == ["policy-000001"]


async def test_a_fresh_adapter_may_change_nothing(client: SamplingClient) -> None:
    await client.publish(adapter(0, "inert"), Canary(tokens=(1, 2, 3), changes_model=False))
    assert client.current == adapter(0, "inert")


@pytest.mark.parametrize(("trainer_says", "is_accepted"), [(-1.75, True), (-1.78, True), (-2.75, False)])
async def test_an_adapter_must_give_the_trainers_logprobs(
    client: SamplingClient, trainer_says: float, is_accepted: bool
) -> None:
    # the fake answers -1.75 for each token of an adapter and -2 for the base model; the limit is 0.05
    canary = Canary(
        tokens=(1, 2, 3),
        changes_model=True,
        training_logprobs=(0.0, trainer_says, trainer_says),
        training_base_logprobs=(0.0, -2.0, -2.0),
    )
    if is_accepted:
        await client.publish(adapter(1), canary)
        return
    with pytest.raises(AdapterError, match=r"mean difference of 1\.000"):
        await client.publish(adapter(1), canary)


async def test_a_probe_is_proven_and_never_announced(client: SamplingClient, fake: FakeVllm) -> None:
    await client.publish(adapter(1))
    canary = Canary(tokens=(1, 2, 3), changes_model=True)

    await client.probe(adapter(999_999), canary)
    with pytest.raises(AdapterError, match="match no module"):
        await client.probe(adapter(999_999, "inert"), canary)

    assert client.current == adapter(1)
    assert served_names(fake) == ["policy-000001"]


async def test_an_adapter_that_the_server_cannot_load_is_an_adapter_error(client: SamplingClient) -> None:
    with pytest.raises(AdapterError, match="No adapter found"):
        await client.publish(adapter(1, "missing"))
    assert client.current is None


async def test_a_proxy_whose_server_is_away_refuses_no_adapter(client: SamplingClient, fake: FakeVllm) -> None:
    fake.load_failures.extend([502, 503])
    await client.publish(adapter(1))
    assert served_names(fake) == ["policy-000001"]


async def test_an_adapter_that_cannot_be_unloaded_stops_nothing(client: SamplingClient, fake: FakeVllm) -> None:
    await client.publish(adapter(1))
    fake.unload_failures.extend([500] * 3)
    await client.publish(adapter(2))
    assert client.current == adapter(2)
    assert served_names(fake) == ["policy-000001", "policy-000002"]


async def test_a_server_without_runtime_updates_is_a_config_error(fake: FakeVllm) -> None:
    fake.can_update_adapters = False
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        async with ExternalServer(f"{url}/v1/") as server, SamplingClient(server) as client:
            with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
                await client.publish(adapter(1))


async def test_nothing_at_base_url_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="start one there"):
        async with ExternalServer("http://127.0.0.1:1/v1"):
            pass


async def test_an_external_server_that_lost_its_adapters_gets_them_again(
    client: SamplingClient, fake: FakeVllm
) -> None:
    await client.publish(adapter(1))
    fake.adapters.clear()  # somebody restarted it
    _, used = await client.respond(RESPONSES_PATH, REQUEST)
    assert used == adapter(1)
    assert served_names(fake) == ["policy-000001"]


async def test_runs_that_share_a_server_keep_their_adapters_apart(client: SamplingClient, fake: FakeVllm) -> None:
    await client.publish(adapter(1))
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        async with ExternalServer(url) as server, SamplingClient(server) as other_run:
            await other_run.publish(adapter(1, "another_adapter"))
    assert sorted(fake.adapters.values()) == ["adapter", "another_adapter"]


async def test_server_errors_are_retried_a_bounded_number_of_times(client: SamplingClient, fake: FakeVllm) -> None:
    fake.failures.extend([500, 503])
    await client.respond(RESPONSES_PATH, REQUEST)
    fake.failures.extend([500, 500, 500])
    with pytest.raises(SamplingError, match="3 attempts"):
        await client.respond(RESPONSES_PATH, REQUEST)


async def test_a_refusal_is_not_retried(client: SamplingClient, fake: FakeVllm) -> None:
    fake.failures.append(400)
    with pytest.raises(RequestRejected):
        await client.respond(RESPONSES_PATH, REQUEST)
    assert len(fake.requests) == 1


def test_the_canary_is_a_datum_with_all_tokens_but_the_first_on_its_mask(renderer: Qwen3VLRenderer) -> None:
    datum = canary_datum(text_canary(renderer))
    assert datum.num_trained_tokens == datum.model_input.length - 1


async def test_a_dropped_connection_does_not_take_the_only_server_from_others(
    client: SamplingClient, fake: FakeVllm
) -> None:
    await client.publish(adapter(1))
    fake.gate = asyncio.Event()
    other = asyncio.create_task(client.respond(RESPONSES_PATH, REQUEST))
    await fake.has_arrived.wait()
    fake.drops_requests = True
    with pytest.raises(SamplingError, match="3 attempts"):
        await client.respond(RESPONSES_PATH, REQUEST)
    fake.gate.set()
    assert (await other)[1] == adapter(1)
