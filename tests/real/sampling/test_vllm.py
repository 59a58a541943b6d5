"""Against a real vLLM on a tiny random Qwen3-VL: one server for all tests of this file."""

import asyncio
import gc
import os
import signal
from base64 import b64encode
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.run.preflight import require_model_server
from cua_rl.run_folder.model_folder import make_image_renderer
from cua_rl.sampling.address import server_client
from cua_rl.sampling.canary import Canary, canary_tokens, image_canary, scored_tokens
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.http_client import encode_body
from cua_rl.sampling.known_images import MISSING_DATA, KnownImages
from cua_rl.sampling.server import VllmServer
from cua_rl.sampling.vllm_responses import RESPONSES_PATH, parse_sampled, sampling_request
from cua_rl.types.conversation import EncodedImage, Message, TextPart
from cua_rl.types.errors import AdapterError, ConfigError
from cua_rl.types.rollout import AdapterRef, SamplingParams
from tests.live_processes import command_line
from tests.patience import patience
from tests.real.sampling.tiny_model import VISION_TARGETS, adapter_logprobs, build_adapter, rename_adapter_keys
from tests.renderers.generated import encode_image, make_image

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOL: Any = {
    "type": "function",
    "name": "click",
    "description": "Tap",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": False,
}
NUM_PUBLICATIONS = 60


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that changes the model, another one, one whose keys match nothing, one that changes nothing, one that
    changes what the model sees.
    """
    root = tmp_path_factory.mktemp("adapters")
    one = build_adapter(tiny_model, root / "one", scale=0.1)
    return {
        "one": one,
        "other": build_adapter(tiny_model, root / "other", scale=0.1, seed=2),
        "mismatched": rename_adapter_keys(one, root / "mismatched"),
        "fresh": build_adapter(tiny_model, root / "fresh", scale=0.0),
        "vision": build_adapter(tiny_model, root / "vision", scale=0.3, targets=VISION_TARGETS),
    }


@pytest_asyncio.fixture(loop_scope="session")
async def client(vllm: VllmServer) -> AsyncGenerator[SamplingClient]:
    async with SamplingClient(vllm, namespace="test") as sampling:
        yield sampling
        async with server_client(vllm.base_url, vllm.api_key) as plain:  # the server is shared by all tests
            for adapter in sampling.replicas[0].loaded:
                await plain.post("/v1/unload_lora_adapter", json={"lora_name": f"{adapter.name}-test"})


@pytest.fixture
def gateway(client: SamplingClient, tiny_renderer: Qwen3VLRenderer) -> Gateway:
    return Gateway(client, tiny_renderer, SamplingParams(max_tokens=24, temperature=1.0))


def question(seed: int) -> Any:
    url = f"data:image/png;base64,{b64encode(encode_image(make_image(192, 320, seed))).decode()}"
    image = {"type": "input_image", "image_url": url, "detail": "auto"}
    return {"role": "user", "content": [{"type": "input_text", "text": f"Step {seed}."}, image]}


async def test_prompts_equal_the_renderers_over_turns_with_images_and_tools(
    gateway: Gateway, client: SamplingClient, adapters: dict[str, Path]
) -> None:
    await client.publish(AdapterRef(path=adapters["one"], policy_version=1))
    gateway.open_rollout("r")
    agent = gateway.openai_client("r")
    items: list[Any] = [{"role": "system", "content": "Be brief."}, question(0)]
    for step in range(1, 4):
        response = await agent.responses.create(model="policy", input=items, tools=[TOOL])
        items += [item.to_dict() for item in response.output]
        items.append(question(step))
    turns = gateway.close_rollout("r")
    assert [turn.prompt_matches_renderer for turn in turns] == [True] * 3
    # 192 x 320 pixels, patches of 16, merged 2 x 2: 6 x 10 = 60 image tokens
    assert [[image.expected_tokens for image in turn.prompt.image_chunks] for turn in turns] == [
        [60] * n for n in (1, 2, 3)
    ]
    for turn in turns:
        assert 1 <= len(turn.sampled_tokens) == len(turn.sampling_logprobs) <= 24
        assert all(-9000 < logprob <= 0 for logprob in turn.sampling_logprobs)
    assert turns[2].cached_tokens > 0


async def test_screenshots_that_the_server_has_may_be_named_instead_of_sent(vllm: VllmServer) -> None:
    def request(seed: int) -> dict[str, Any]:
        image = EncodedImage(data=encode_image(make_image(192, 320, seed)), format="png", width_px=192, height_px=320)
        greedy = SamplingParams(max_tokens=8, temperature=0.0)
        items = (Message(role="user", content=(TextPart(text="What is here?"), image)),)
        return sampling_request(items, (), greedy) | {"model": vllm.model.name}

    known = KnownImages()
    known.add(request(101))
    known.add(request(102))
    async with server_client(vllm.base_url, vllm.api_key, timeout_s=patience(60.0)) as plain:
        plain.headers["Content-Type"] = "application/json"
        whole = await plain.post(RESPONSES_PATH, content=encode_body(request(101)))
        named = await plain.post(RESPONSES_PATH, content=encode_body(known.leave_out(request(101))))
        never_sent = await plain.post(RESPONSES_PATH, content=encode_body(known.leave_out(request(102))))

    assert vllm.model.takes_image_names
    assert b"base64" not in named.request.content
    sampled, sampled_whole = parse_sampled(named.json()), parse_sampled(whole.json())
    assert (sampled.prompt_ids, sampled.tokens) == (sampled_whole.prompt_ids, sampled_whole.tokens)
    assert never_sent.is_client_error
    assert MISSING_DATA in never_sent.text


async def test_chat_completions_reach_the_same_model(gateway: Gateway) -> None:
    gateway.open_rollout("chat")
    completion = await gateway.openai_client("chat").chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hi"}]
    )
    (turn,) = gateway.close_rollout("chat")
    assert turn.prompt_matches_renderer
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(turn.sampled_tokens)


async def test_every_sampled_token_has_a_logprob_ends_of_turn_too(
    gateway: Gateway, tiny_renderer: Qwen3VLRenderer
) -> None:
    """A random model ends about one answer in 25 at the first token, so 150 answers hold some."""
    gateway.open_rollout("many", params=SamplingParams(max_tokens=40, temperature=2.0))
    agent = gateway.openai_client("many")
    await asyncio.gather(*(agent.responses.create(model="policy", input=f"{n}") for n in range(150)))
    turns = gateway.close_rollout("many")
    ended = [turn for turn in turns if turn.stop == "stop"]
    assert len(turns) == 150
    assert ended
    for turn in ended:
        assert turn.sampled_tokens[-1] in tiny_renderer.stop_token_ids
        assert turn.text == tiny_renderer.decode(turn.sampled_tokens[:-1])


async def test_an_answer_with_a_stop_is_the_beginning_of_the_one_without(
    gateway: Gateway, tiny_renderer: Qwen3VLRenderer
) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
    question: Any = [{"role": "user", "content": "Go."}]
    for name in ("whole", "stopped", "short"):
        gateway.open_rollout(name, params=params)
    await gateway.openai_client("whole").chat.completions.create(model="policy", messages=question)
    (whole,) = gateway.close_rollout("whole")
    stop = whole.text[len(whole.text) // 2 :][:3]
    stopped = await gateway.openai_client("stopped").chat.completions.create(
        model="policy", messages=question, stop=["never said", stop]
    )
    await gateway.openai_client("short").responses.create(model="policy", input=question, max_output_tokens=7)

    (turn,), (short,) = gateway.close_rollout("stopped"), gateway.close_rollout("short")
    num_tokens = len(turn.sampled_tokens)
    assert len(stop) == 3
    said = whole.text[: whole.text.index(stop)].rpartition("</think>")[2]  # a random model may think
    assert (stopped.choices[0].message.content or "").strip() == said.strip()
    assert stopped.choices[0].finish_reason == "stop"
    assert turn.sampled_tokens == whole.sampled_tokens[:num_tokens]
    assert stop in tiny_renderer.decode(turn.sampled_tokens)
    assert stop not in tiny_renderer.decode(turn.sampled_tokens[:-1])
    assert turn.sampling_logprobs == pytest.approx(whole.sampling_logprobs[:num_tokens], abs=1e-3)
    assert (short.stop, short.sampled_tokens) == ("length", whole.sampled_tokens[:7])


async def test_requests_with_seeds_survive_prompts_that_are_computed_in_parts(gateway: Gateway) -> None:
    """More prompt tokens at a time than vLLM computes in one batch, so that some prompts are split."""
    names = [f"seeded-{number}" for number in range(48)]
    for number, name in enumerate(names):
        gateway.open_rollout(name, params=SamplingParams(max_tokens=24, temperature=1.0, seed=number))
    prompts: list[Any] = [[question(3 * number + image) for image in range(3)] for number in range(len(names))]
    agents = [gateway.openai_client(name) for name in names]

    await asyncio.gather(
        *(agent.responses.create(model="policy", input=prompt) for agent, prompt in zip(agents, prompts, strict=True))
    )

    assert all(len(gateway.close_rollout(name)) == 1 for name in names)


async def test_logprobs_are_those_of_transformers_at_the_runs_temperature(
    gateway: Gateway,
    client: SamplingClient,
    adapters: dict[str, Path],
    tiny_model: Path,
    tiny_renderer: Qwen3VLRenderer,
) -> None:
    await client.publish(AdapterRef(path=adapters["one"], policy_version=1))
    gateway.open_rollout("text")
    await gateway.openai_client("text").responses.create(model="policy", input="Open mail.")
    (turn,) = gateway.close_rollout("text")
    prompt = turn.prompt.token_ids(tiny_renderer.image_token_id)
    expected = adapter_logprobs(tiny_model, adapters["one"], (*prompt, *turn.sampled_tokens))[len(prompt) :]
    assert turn.sampling_logprobs == pytest.approx(expected, abs=1e-3)


async def test_the_canary_tells_adapters_apart(
    client: SamplingClient, adapters: dict[str, Path], tiny_model: Path, tiny_renderer: Qwen3VLRenderer
) -> None:
    tokens = canary_tokens(tiny_renderer)
    trainer_says = adapter_logprobs(tiny_model, adapters["one"], tokens)
    proven = Canary(
        tokens=tokens,
        changes_model=True,
        training_logprobs=trainer_says,
        training_base_logprobs=adapter_logprobs(tiny_model, None, tokens),
        limit=1e-3,
    )
    await client.publish(
        AdapterRef(path=adapters["fresh"], policy_version=0), Canary(tokens=tokens, changes_model=False)
    )
    await client.publish(AdapterRef(path=adapters["one"], policy_version=1), proven)
    with pytest.raises(AdapterError, match="another adapter"):
        await client.publish(AdapterRef(path=adapters["other"], policy_version=2), proven)
    for wrong in ("mismatched", "fresh"):
        with pytest.raises(AdapterError, match="match no module"):
            await client.publish(AdapterRef(path=adapters[wrong], policy_version=3), proven)
    assert client.current == AdapterRef(path=adapters["one"], policy_version=1)


async def test_the_canary_with_an_image_shows_an_adapter_on_the_vision_tower_that_is_ignored(
    client: SamplingClient, adapters: dict[str, Path], tiny_renderer: Qwen3VLRenderer
) -> None:
    """The server of this file was started without `--enable-tower-connector-lora`."""
    prompt = image_canary(tiny_renderer)
    canary = Canary(tokens=scored_tokens(prompt), image=prompt.images[0], changes_model=True)

    await client.probe(AdapterRef(path=adapters["one"], policy_version=901), canary)
    with pytest.raises(AdapterError, match="match no module"):
        await client.probe(AdapterRef(path=adapters["vision"], policy_version=902), canary)


async def test_an_adapter_is_proven_beside_requests_to_another(
    client: SamplingClient,
    gateway: Gateway,
    adapters: dict[str, Path],
    tiny_model: Path,
    tiny_renderer: Qwen3VLRenderer,
) -> None:
    """The canary's tokens share batches with tokens that other adapters sample, of more requests than it has tokens."""
    tokens = canary_tokens(tiny_renderer)[:6]
    trainer_says = adapter_logprobs(tiny_model, adapters["other"], tokens)
    proven = Canary(
        tokens=tokens,
        changes_model=True,
        training_logprobs=trainer_says,
        training_base_logprobs=adapter_logprobs(tiny_model, None, tokens),
        limit=1e-3,
    )
    gateway.open_rollout("busy", adapter=AdapterRef(path=adapters["one"], policy_version=1))
    agent = gateway.openai_client("busy")

    async def keep_asking() -> None:
        while client.current is None or client.current.policy_version < 9:
            await agent.responses.create(model="policy", input="Open mail.")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(keep_asking())
        await asyncio.sleep(1)
        for version in range(2, 10):
            await client.publish(AdapterRef(path=adapters["other"], policy_version=version), proven)

    assert len(gateway.close_rollout("busy")) > 8


async def test_adapters_in_one_batch_do_not_mix(
    client: SamplingClient, gateway: Gateway, adapters: dict[str, Path], tiny_renderer: Qwen3VLRenderer
) -> None:
    """Greedy answers of two adapters and the base model are the same asked alone and asked all at once."""
    refs = [AdapterRef(path=adapters[name], policy_version=version) for version, name in ((1, "one"), (2, "other"))]
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    alone = list[tuple[int, ...]]()
    for name, adapter in (("base", None), ("one", refs[0]), ("other", refs[1])):
        gateway.open_rollout(name, params=greedy, adapter=adapter)
        await gateway.openai_client(name).responses.create(model="policy", input="Open mail.")
        alone += [turn.sampled_tokens for turn in gateway.turns(name)]
    clients = [gateway.openai_client(name) for name in ("base", "one", "other")] * 4
    await asyncio.gather(*(agent.responses.create(model="policy", input="Open mail.") for agent in clients))
    together = [[turn.sampled_tokens for turn in gateway.close_rollout(name)[1:]] for name in ("base", "one", "other")]
    assert len(set(alone)) == 3
    assert together == [[tokens] * 4 for tokens in alone]


async def test_memory_stays_flat_over_publications(
    vllm: VllmServer, client: SamplingClient, gateway: Gateway, adapters: dict[str, Path]
) -> None:
    gateway.open_rollout("memory")
    agent = gateway.openai_client("memory")
    rss_mib: list[float] = []
    for version in range(NUM_PUBLICATIONS):
        path = adapters["one" if version % 2 else "other"]
        await client.publish(AdapterRef(path=path, policy_version=100 + version))
        await agent.responses.create(model="policy", input="hi")
        if version in (NUM_PUBLICATIONS // 3, NUM_PUBLICATIONS - 1):
            gc.collect()
            family = [psutil.Process(), *psutil.Process().children(recursive=True)]
            rss_mib.append(sum(process.memory_info().rss for process in family) / 2**20)
    gateway.close_rollout("memory")
    assert len(client.replicas[0].loaded) == 1
    assert rss_mib[1] - rss_mib[0] < 60


async def test_killing_the_server_in_mid_flight_loses_no_turn(
    vllm: VllmServer, client: SamplingClient, gateway: Gateway, adapters: dict[str, Path]
) -> None:
    """Last in the file: the restart takes as long as the start."""
    await client.publish(AdapterRef(path=adapters["one"], policy_version=7))
    gateway.open_rollout("before")
    await gateway.openai_client("before").responses.create(model="policy", input=[question(0)])
    gateway.open_rollout("hit", params=SamplingParams(max_tokens=400, temperature=2.0))
    agent = gateway.openai_client("hit")
    asked = [asyncio.create_task(agent.responses.create(model="policy", input=[question(n)])) for n in range(12)]
    await asyncio.sleep(0.7)  # some are being sampled now
    os.kill(engine_process(vllm).pid, signal.SIGKILL)
    answers = await asyncio.gather(*asked)
    turns = gateway.close_rollout("hit")
    assert vllm.num_restarts == 1
    assert sorted(turn.response_id for turn in turns) == sorted(answer.id for answer in answers)
    assert {turn.policy_version for turn in turns} == {7}
    # a server that has started again no longer has this screenshot
    await gateway.openai_client("before").responses.create(model="policy", input=[question(0), question(20)])
    assert [turn.prompt_matches_renderer for turn in gateway.close_rollout("before")] == [True, True]


def engine_process(server: VllmServer) -> psutil.Process:
    """The engine of this server: other tests of this process may have one of their own."""
    port = server.base_url.rpartition(":")[2]
    for process in psutil.Process().children(recursive=True):
        if command_line(process)[1:2] == ["-m"] and port in command_line(process):
            return next(child for child in process.children() if "EngineCore" in " ".join(command_line(child)))
    raise AssertionError(f"expected a model server on port {port} among our processes, found none")


async def test_a_server_says_before_training_how_many_screenshots_it_takes_and_how_large(
    vllm: VllmServer, tiny_model: Path, tiny_renderer: Qwen3VLRenderer
) -> None:
    """The fixture's server takes 4 images of at most 256 x 256 pixels, and 2,048 tokens."""
    smaller = make_image_renderer(tiny_model, None, 128 * 128)
    await require_model_server(vllm.base_url, tiny_renderer, max_model_len=2048, num_images=4)
    with pytest.raises(ConfigError, match=r"At most 4 image\(s\)"):
        await require_model_server(vllm.base_url, tiny_renderer, max_model_len=2048, num_images=5)
    with pytest.raises(ConfigError, match="max_model_len: expected at most 2048"):
        await require_model_server(vllm.base_url, tiny_renderer, max_model_len=4096, num_images=4)
    # scaled to 160 x 352 and 64 x 160 pixels
    with pytest.raises(ConfigError, match=r"pixels in 10 tokens, as this run does, got 55 from"):
        await require_model_server(vllm.base_url, smaller, max_model_len=2048, num_images=4)


async def test_every_address_of_the_server_asks_for_the_key(vllm: VllmServer) -> None:
    async with server_client(vllm.base_url, vllm.api_key) as ours, server_client(vllm.base_url, "wrong") as stranger:
        assert (await ours.get("/health")).is_success
        listed = (await ours.get("/openapi.json")).json()["paths"]
        assert {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/tokenize", "/v1/responses"} <= listed.keys()
        unlisted = ("/metrics", "/docs", "/openapi.json", "/no-such-path")  # refused before any route is looked up
        asked = [(method.upper(), path) for path, methods in listed.items() for method in methods]
        for method, path in [*asked, *(("GET", path) for path in unlisted)]:
            for client in (stranger, server_client(vllm.base_url, None)):
                assert (await client.request(method, path, json={})).status_code == 401, path


async def test_the_server_fetches_no_image(vllm: VllmServer) -> None:
    num_connections = 0

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, server_client(vllm.base_url, vllm.api_key, timeout_s=patience(60.0)) as client:
        for url in (f"http://127.0.0.1:{port}/x.png", f"http://localhost:{port}/x.png", "file:///etc/hostname"):
            part = {"type": "image_url", "image_url": {"url": url}}
            body = {"model": vllm.model.name, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
            assert (await client.post("/v1/chat/completions", json=body)).is_error
    assert num_connections == 0
