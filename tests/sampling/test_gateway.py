import asyncio
import json
import re
import time
from base64 import b64decode, b64encode
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from cua_rl.agent.policy_time import RolloutClock
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rl.datums import fork_reason
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.gateway_app import ContextOverflow
from cua_rl.types.rollout import AdapterRef, ModelTurn, SamplingParams
from tests.renderers.generated import encode_image, make_image
from tests.sampling.fake_vllm import LOGPROB, FakeVllm

CLICK = '<think>\nThe icon is there.\n</think>\n\n<tool_call>\n{"name": "click", "arguments": {"x": 5}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "name": "click",
    "description": "Tap",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}
SCREEN = encode_image(make_image(64, 96))
SCREEN_URL = f"data:image/png;base64,{b64encode(SCREEN).decode()}"
QUESTION: Any = {
    "role": "user",
    "content": [
        {"type": "input_text", "text": "Open mail."},
        {"type": "input_image", "image_url": SCREEN_URL, "detail": "auto"},
    ],
}


def flat_ids(turn: ModelTurn, renderer: Qwen3VLRenderer) -> list[int]:
    return turn.prompt.token_ids(renderer.image_token_id)


@pytest.fixture
def agent(gateway: Gateway) -> AsyncOpenAI:
    gateway.open_rollout("r1")
    return gateway.openai_client("r1")


async def test_an_answer_comes_back_as_reasoning_and_function_call_items(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    fake.answers.append(CLICK)

    response = await agent.responses.create(model="policy", input=[QUESTION], tools=[TOOL])

    reasoning, call = response.output
    assert (reasoning.type, call.type, response.status) == ("reasoning", "function_call", "completed")
    assert reasoning.content is not None
    assert reasoning.content[0].text == "The icon is there."
    assert (call.name, json.loads(call.arguments)) == ("click", {"x": 5})
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 3


async def test_an_agent_in_this_process_is_answered_and_recorded_as_one_outside(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm
) -> None:
    fake.answers += [CLICK, CLICK]
    request: Any = {"model": "policy", "input": [QUESTION], "tools": [TOOL]}

    answers = [await gateway.respond("r1", request), await agent.post("/responses", cast_to=object, body=request)]

    changing = r'[0-9a-f]{32}|"created_at": [0-9]+'
    here, outside = (re.sub(changing, "", json.dumps(answer)) for answer in answers)
    assert here == outside
    first, second = gateway.turns("r1")
    assert (first.prompt, first.request) == (second.prompt, second.request)
    with pytest.raises(ContextOverflow):
        await gateway.respond("r1", request | {"input": "word " * 20_000})


async def test_a_turn_records_tokens_logprobs_prompt_and_request(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    fake.answers.append(CLICK)

    response = await agent.responses.create(model="policy", input=[QUESTION], tools=[TOOL])
    (turn,) = gateway.close_rollout("r1")

    assert turn.response_id == response.id
    assert turn.text == CLICK
    assert turn.sampled_tokens == (*renderer.encode(CLICK), renderer.stop_token_ids[0])
    assert set(turn.sampling_logprobs) == {LOGPROB}
    assert (turn.stop, turn.prompt_matches_renderer, turn.cached_tokens) == ("stop", True, 3)
    assert [image.data for image in turn.prompt.images] == [SCREEN]
    # 64 x 96 pixels, patches of 16, merged 2 x 2: 2 x 3 = 6 image tokens
    assert flat_ids(turn, renderer).count(renderer.image_token_id) == 6
    image = turn.prompt.images[0]
    assert f"sha256:{image.sha256}" in json.dumps(turn.request)
    assert "base64" not in json.dumps(turn.request)


async def test_the_server_is_asked_for_the_runs_own_distribution_whatever_the_agent_wants(
    agent: AsyncOpenAI, fake: FakeVllm
) -> None:
    await agent.responses.create(model="gpt", input="hi", temperature=0.1, top_p=0.5, max_output_tokens=99, store=True)

    (sent,) = fake.requests
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["max_output_tokens"]) == (1.0, 1.0, 0, 64)
    assert (sent["store"], sent["model"], sent["enable_response_messages"]) == (False, "base", True)


async def test_the_next_prompt_extends_prompt_and_answer_token_for_token(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    fake.answers.extend([CLICK, "  odd   spacing <tool_call>{broken"])
    items: list[Any] = [QUESTION]
    for _ in range(3):
        response = await agent.responses.create(model="policy", input=items, tools=[TOOL])
        items += [item.to_dict() for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if calls:
            items.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": QUESTION["content"]})
        else:
            items.append(QUESTION)

    first, second, third = gateway.turns("r1")
    for earlier, later in ((first, second), (second, third)):
        so_far = [*flat_ids(earlier, renderer), *earlier.sampled_tokens]
        assert flat_ids(later, renderer)[: len(so_far)] == so_far
    assert gateway.prompt_mismatches == 0
    assert second.failure is not None


async def test_answers_come_back_raw_even_if_the_agent_drops_ids_and_reasoning(
    agent: AsyncOpenAI, fake: FakeVllm
) -> None:
    fake.answers.append("<think>\nhm\n</think>\n\nSure thing.")
    response = await agent.responses.create(model="policy", input="hi")
    history: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": response.output_text},
        {"role": "user", "content": "go on"},
    ]

    await agent.responses.create(model="policy", input=history)

    assert fake.requests[1]["input"][1]["content"] == "<think>\nhm\n</think>\n\nSure thing."


async def test_an_agent_may_name_earlier_responses_and_items_instead_of_sending_them_again(
    agent: AsyncOpenAI, gateway: Gateway, renderer: Qwen3VLRenderer, fake: FakeVllm
) -> None:
    fake.answers.extend([CLICK, CLICK])
    whole: Any = {"model": "policy", "instructions": "Use the phone.", "tools": [TOOL]}
    first = await agent.responses.create(input=[QUESTION], **whole)
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": QUESTION["content"]}
    second = await agent.responses.create(input=[output], previous_response_id=first.id, **whole)
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    await agent.responses.create(input=[QUESTION, *references, output], **whole)
    await agent.responses.create(input="go on", previous_response_id=second.id, **whole)

    one, two, again, three = gateway.turns("r1")
    for earlier, later in ((one, two), (two, three)):
        so_far = [*flat_ids(earlier, renderer), *earlier.sampled_tokens]
        assert flat_ids(later, renderer)[: len(so_far)] == so_far
    assert flat_ids(again, renderer) == flat_ids(two, renderer)
    assert [image.data for image in three.prompt.images] == [SCREEN, SCREEN]
    assert "sha256" in json.dumps(two.request)


async def test_responses_of_another_rollout_are_unknown(agent: AsyncOpenAI, gateway: Gateway) -> None:
    first = await agent.responses.create(model="policy", input="hi")
    gateway.open_rollout("r2")
    other = gateway.openai_client("r2")

    with pytest.raises(openai.BadRequestError, match="a response of this rollout"):
        await other.responses.create(model="policy", input="hi", previous_response_id=first.id)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    with pytest.raises(openai.BadRequestError, match="output item of this rollout"):
        await other.responses.create(model="policy", input=[reference])


async def test_a_conversation_of_more_items_than_tokens_fit_is_refused_at_once(gateway: Gateway) -> None:
    gateway.open_rollout("long")
    calls = [{"id": f"{number}", "function": {"name": "f", "arguments": ""}} for number in range(20_000)]
    pairs = [{"role": "tool", "tool_call_id": "x"}, {"role": "user"}] * 20_000
    answers = [{"role": "assistant", "content": f"{number}"} for number in range(40_000)]
    messages = [{"role": "assistant", "tool_calls": calls}, *pairs, *answers]
    started = time.process_time()

    with pytest.raises(ContextOverflow, match="100000 items"):
        await gateway.answer("long", {"messages": messages}, "chat")
    assert time.process_time() - started < 5.0


async def test_a_probe_with_cua_train_no_is_answered_but_is_no_turn(
    agent: AsyncOpenAI, gateway: Gateway, renderer: Qwen3VLRenderer, fake: FakeVllm
) -> None:
    heard: list[ModelTurn] = []

    async def hear(turn: ModelTurn) -> None:
        heard.append(turn)

    watch = RolloutWatch(max_turns=2, on_answer=hear, clock=RolloutClock())
    # what inspect_ai's `openai/` provider asks before the first request
    probe: Any = {"input": "Please say 'hello, world'", "reasoning": {"effort": "low", "summary": "auto"}}
    items: list[Any] = [QUESTION]
    fake.answers.extend(["hello, world", CLICK, "hello again", CLICK])
    async with gateway.serve():
        with gateway.expose("r1", watch):
            said = await agent.responses.create(model="policy", extra_headers={"CUA-Train": "no"}, **probe)
            first = await agent.responses.create(model="policy", input=items, tools=[TOOL])
            await agent.responses.create(model="policy", extra_headers={"CUA-Train": "no"}, **probe)
            items += [*(item.to_dict() for item in first.output), {**QUESTION, "content": "go on"}]
            await agent.responses.create(model="policy", input=items, tools=[TOOL])
            with pytest.raises(openai.PermissionDeniedError):
                await agent.responses.create(model="policy", input=items, tools=[TOOL])
        for train in ("yes", "no"):  # from a program that does not end, while its rollout is judged
            with pytest.raises(openai.PermissionDeniedError, match="ended"):
                await agent.responses.create(model="policy", extra_headers={"CUA-Train": train}, **probe)

    assert said.output_text == "hello, world"
    assert tuple(heard) == gateway.turns("r1")
    one, two = heard
    assert fork_reason(one, two, renderer.image_token_id) is None


async def test_an_answer_to_a_repeated_request_is_not_taken_for_that_of_the_turn(
    agent: AsyncOpenAI, gateway: Gateway, renderer: Qwen3VLRenderer, fake: FakeVllm
) -> None:
    fake.answers.extend(f"<think>\n{thought}\n</think>\n\nSure." for thought in ("first", "second"))
    await agent.responses.create(model="policy", input="hi", extra_headers={"CUA-Train": "no"})
    await agent.responses.create(model="policy", input="hi")
    history: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure."}]
    await agent.responses.create(model="policy", input=[*history, {"role": "user", "content": "go on"}])

    one, two = gateway.turns("r1")
    assert fork_reason(one, two, renderer.image_token_id) is None


async def test_an_edited_answer_is_sent_as_the_agent_wrote_it(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    fake.answers.append("<think>\nhm\n</think>\n\nSure thing.")
    await agent.responses.create(model="policy", input="hi")
    history: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Never."}]

    await agent.responses.create(model="policy", input=history)

    assert fake.requests[1]["input"][1]["content"] == "Never."


async def test_chat_completions_record_the_same_turn(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    fake.answers.append(CLICK)
    picture = {"type": "image_url", "image_url": {"url": SCREEN_URL}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Open mail."}, picture]}]

    first = await agent.chat.completions.create(model="policy", messages=messages, tools=[CHAT_TOOL])
    message = first.choices[0].message
    assert message.tool_calls is not None
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "tapped"}]
    second = await agent.chat.completions.create(model="policy", messages=messages, tools=[CHAT_TOOL])

    assert (first.choices[0].finish_reason, second.choices[0].finish_reason) == ("tool_calls", "stop")
    assert second.choices[0].message.content == "done"
    one, two = gateway.turns("r1")
    so_far = [*flat_ids(one, renderer), *one.sampled_tokens]
    assert flat_ids(two, renderer)[: len(so_far)] == so_far


async def test_tool_calls_get_ids_of_their_own(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    fake.answers.extend([CLICK, CLICK])
    ids = set[str]()
    for _ in range(2):
        response = await agent.responses.create(model="policy", input=[QUESTION], tools=[TOOL])
        ids |= {item.call_id for item in response.output if item.type == "function_call"}
    assert len(ids) == 2


async def test_an_answer_cut_off_by_the_limit_is_incomplete_and_keeps_all_tokens(
    gateway: Gateway, fake: FakeVllm
) -> None:
    gateway.open_rollout("short", params=SamplingParams(max_tokens=3, temperature=1.0))
    fake.answers.append("a long answer that is cut off")

    response = await gateway.openai_client("short").responses.create(model="policy", input="hi")

    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    (turn,) = gateway.close_rollout("short")
    assert (turn.stop, len(turn.sampled_tokens)) == ("length", 3)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_agent_may_ask_for_a_shorter_answer_than_the_runs(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm, field: str
) -> None:
    fake.answers.extend(["a long answer that is cut off", "a long answer that is cut off"])
    chat = await agent.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hi"}], extra_body={field: 3}
    )
    response = await agent.responses.create(model="policy", input="hi", max_output_tokens=4)

    assert (chat.choices[0].finish_reason, response.status) == ("length", "incomplete")
    assert [len(turn.sampled_tokens) for turn in gateway.turns("r1")] == [3, 4]


async def test_an_answer_ends_at_a_stop_which_is_sampled_but_not_shown(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    fake.answers.extend(["Thought: look.\nObservation: nothing", "done"])
    question: Any = {"role": "user", "content": "hi"}
    stop = ["\nObservation:", "never"]
    first = await agent.chat.completions.create(model="policy", messages=[question], stop=stop)
    answer, after = first.choices[0].message.content, {"role": "user", "content": "Observation: a page"}
    history: Any = [question, {"role": "assistant", "content": answer}, after]
    await agent.chat.completions.create(model="policy", messages=history, stop=stop)

    assert (answer, first.choices[0].finish_reason) == ("Thought: look.", "stop")
    one, two = gateway.turns("r1")
    assert one.sampled_tokens == tuple(renderer.encode("Thought: look.\nObservation:"))
    prompt, sampled = flat_ids(one, renderer), one.sampled_tokens
    assert flat_ids(two, renderer)[: len(prompt) + len(sampled)] == [*prompt, *sampled]


async def test_fields_without_effect_are_named_in_a_header_and_logged_once(
    gateway: Gateway, fake: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.open_rollout("r")
    ask = gateway.openai_client("r").with_raw_response
    same = {"tool_choice": "auto", "temperature": 1.0, "max_output_tokens": 8, "parallel_tool_calls": True}
    silent = await ask.responses.create(model="policy", input="hi", extra_body=same)
    for stream in (False, True):
        named = await ask.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            stream=stream,
            extra_body={"top_p": 0.5, "temperature": 0.0, "max_tokens": 1000, "stop": "x", "seed": None},
        )
        assert named.headers["CUA-Ignored"] == "max_tokens, temperature, top_p"

    assert "CUA-Ignored" not in silent.headers
    assert [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()] == [
        "without effect in an agent's requests: max_tokens, temperature, top_p (see docs/agents.md)"
    ]


async def test_an_answer_of_only_the_end_of_turn_has_its_logprob(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm
) -> None:
    fake.answers.append("")
    response = await agent.responses.create(model="policy", input="hi")
    assert response.output_text == ""
    (turn,) = gateway.turns("r1")
    assert (len(turn.sampled_tokens), turn.text, turn.sampling_logprobs) == (1, "", (LOGPROB,))


async def test_the_servers_prompt_ids_win_over_the_renderers(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    fake.extra_prompt_token = 7
    await agent.responses.create(model="policy", input=[QUESTION])
    (turn,) = gateway.turns("r1")
    assert (gateway.prompt_mismatches, turn.prompt_matches_renderer) == (1, False)
    assert flat_ids(turn, renderer)[0] == 7
    assert [image.data for image in turn.prompt.images] == [SCREEN]


async def test_responses_stream_as_events_the_openai_package_understands(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    fake.answers.append(CLICK.replace("\n\n<tool_call>", "\n\nTapping.<tool_call>"))
    async with agent.responses.stream(model="policy", input=[QUESTION], tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Tapping."


async def test_chat_streams_as_chunks_the_openai_package_understands(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    fake.answers.append(CLICK)
    stream = await agent.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "hi"}],
        tools=[CHAT_TOOL],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert calls[0].function is not None
    assert calls[0].function.name == "click"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage is not None


async def test_an_event_is_one_line_wherever_a_client_ends_lines(gateway: Gateway, fake: FakeVllm) -> None:
    gateway.open_rollout("r")
    said = "one\u2028two\u0085three"
    fake.answers.append(said)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(gateway.app), base_url="http://gateway/rollouts/r/v1/")
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"Authorization": f"Bearer {gateway.openai_client('r').api_key}"}

    async with http, http.stream("POST", "chat/completions", json=body, headers=headers) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]

    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == said


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/a.png"}]}]},
        {"input": [{"type": "computer_call"}]},
        {"input": "hi", "previous_response_id": "resp_1"},
        {"input": "hi", "extra_body": {"n": 2}},
    ],
)
async def test_requests_that_cannot_be_rendered_are_refused_with_openais_error_body(
    agent: AsyncOpenAI, fake: FakeVllm, body: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await agent.responses.create(model="policy", **body)
    assert caught.value.code == "invalid_request"
    assert "expected" in caught.value.message
    assert fake.requests == []


async def test_a_prompt_that_does_not_fit_is_refused_before_it_is_sent(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await agent.responses.create(model="policy", input="word " * 3000)  # the fake takes 2000 tokens
    assert caught.value.code == "context_length_exceeded"
    assert fake.requests == []


async def test_a_wrong_key_and_an_unknown_rollout_look_the_same(agent: AsyncOpenAI, gateway: Gateway) -> None:
    gateway.open_rollout("other")
    refused: list[Any] = []
    for client in (gateway.openai_client("other").with_options(base_url=agent.base_url), agent):
        for ask in (client.responses.create(model="policy", input="hi"), client.models.retrieve("policy")):
            if client is agent and gateway.access("r1") is not None:
                gateway.close_rollout("r1")
            with pytest.raises(openai.AuthenticationError) as caught:
                await ask
            refused.append(caught.value.body)
    assert [body == refused[0] for body in refused] == [True] * 4
    assert refused[0]["code"] == "invalid_api_key"


async def test_the_key_of_a_rollout_is_random_and_may_stand_in_the_path(gateway: Gateway) -> None:
    for rollout_id in ("one", "two"):
        gateway.open_rollout(rollout_id)
    keys = [gateway.openai_client(rollout_id).api_key for rollout_id in ("one", "two")]
    assert len(set(keys)) == 2
    assert min(map(len, keys)) >= 32
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/rollouts/one") as client:
        asked = [await client.get(f"/keys/{key}/v1/models") for key in keys]
        asked.append(await client.get("/v1/models", headers={"Authorization": f"Basic {keys[0]}"}))
        asked.append(await client.post(f"/keys/{keys[0]}/v1/responses", content=b'{"input": "hi"}'))
    assert [answer.status_code for answer in asked] == [200, 401, 401, 415]  # as a page of another site could send it


async def test_a_client_of_another_api_is_told_which_ones_there_are(gateway: Gateway) -> None:
    """As the client libraries of legacy completions ask."""
    gateway.open_rollout("r")
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/rollouts/r/v1/") as client:
        answer = await client.post("completions", json={"prompt": ""})
    assert answer.status_code == 404
    assert "one of responses, chat/completions, messages, models" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "rebound.example"}, 421),
        ({"Content-Type": "text/plain"}, 200),
        ({"Content-Type": ""}, 200),
        ({"Content-Type": "text/plain", "Authorization": "Basic eA=="}, 401),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Length": str(2**40)}, 413),
        ({}, 200),
    ],
)
async def test_only_plain_json_sent_to_the_gateways_own_host_is_read(
    gateway: Gateway, headers: dict[str, str], status: int
) -> None:
    gateway.open_rollout("r")
    sent = {"Authorization": f"Bearer {gateway.openai_client('r').api_key}", "Content-Type": "application/json"}
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/rollouts/r/v1/") as client:
        answer = await client.post("responses", content=b'{"input": "hi"}', headers=sent | headers)
    assert answer.status_code == status


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"input":' * 500 + b"1" + b"}" * 500, b"\xff", b"[]", b"3"],
)
async def test_json_that_is_no_request_is_a_400(gateway: Gateway, body: bytes) -> None:
    gateway.open_rollout("r")
    headers = {"Authorization": f"Bearer {gateway.openai_client('r').api_key}", "Content-Type": "application/json"}
    transport = httpx.ASGITransport(gateway.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/rollouts/r/v1/") as client:
        for path in ("responses", "chat/completions"):
            assert (await client.post(path, content=body, headers=headers)).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        b'"temperature": NaN',
        b'"temperature": 1e999',
        b'"metadata": {"a": "\\ud800"}',
        b'"metadata": {"\\ud800": 1}',
        b'"tools": [{"type": "function", "name": "x", "parameters": {"a": NaN}}]',
        b'"tools": [{"type": "function", "name": "x", "parameters": {"a": "\\ud800"}}]',
    ],
)
async def test_numbers_and_characters_that_no_answer_can_repeat_are_a_400(
    gateway: Gateway, fake: FakeVllm, fields: bytes
) -> None:
    gateway.open_rollout("r")
    headers = {"Authorization": f"Bearer {gateway.openai_client('r').api_key}", "Content-Type": "application/json"}
    transport = httpx.ASGITransport(gateway.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/rollouts/r/v1/") as client:
        answer = await client.post("responses", content=b'{"input": "hi", ' + fields + b"}", headers=headers)
    assert answer.status_code == 400
    assert fake.requests == []


async def test_a_call_whose_arguments_no_text_can_hold_is_sent_without_them(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    call: Any = {"type": "function_call", "call_id": "c", "name": "click", "arguments": '{"x": "\\ud800"}'}
    answer = await agent.responses.create(model="policy", input=[{"role": "user", "content": "hi"}, call])
    assert answer.status == "completed"


async def test_a_server_that_keeps_failing_is_a_503_and_no_turn(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm
) -> None:
    fake.failures.extend([500, 500, 500])
    with pytest.raises(openai.InternalServerError) as caught:
        await agent.responses.create(model="policy", input="hi")
    assert (caught.value.status_code, caught.value.code) == (503, "sampling_failed")
    assert gateway.turns("r1") == ()


async def test_an_answer_without_text_and_logprobs_is_no_turn(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm
) -> None:
    fake.leaves_out_text = True
    with pytest.raises(openai.InternalServerError, match="outside its vocabulary"):
        await agent.responses.create(model="policy", input="hi")
    assert gateway.turns("r1") == ()


async def test_a_server_that_fails_once_gives_one_turn(agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm) -> None:
    fake.failures.append(500)
    await agent.responses.create(model="policy", input="hi")
    assert (len(gateway.turns("r1")), len(fake.requests), gateway.num_requests) == (1, 2, 1)


async def test_agents_in_other_processes_reach_their_rollout_over_a_socket(gateway: Gateway) -> None:
    gateway.open_rollout("far")
    async with gateway.serve() as url:
        api_key = gateway.openai_client("far").api_key
        client = AsyncOpenAI(base_url=f"{url}/rollouts/far/v1", api_key=api_key, max_retries=0)
        models = await client.models.list()
        response = await client.responses.create(model="policy", input="hi")
        async with httpx.AsyncClient(base_url=url) as plain:
            headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
            malformed = await plain.post("/rollouts/far/v1/responses", content=b"[", headers=headers)
    assert [model.id for model in models.data] == ["policy"]
    assert response.output_text == "done"
    assert malformed.status_code == 400
    assert len(gateway.close_rollout("far")) == 1


async def test_a_seed_gives_every_request_its_own_and_the_same_one_again(gateway: Gateway, fake: FakeVllm) -> None:
    for rollout_id, seed in (("a", 3), ("b", 4), ("again", 3)):
        gateway.open_rollout(rollout_id, params=SamplingParams(max_tokens=8, temperature=1.0, seed=seed))
        for _ in range(2):
            await gateway.openai_client(rollout_id).responses.create(model="policy", input="hi")
    seeds = [request["seed"] for request in fake.requests]
    assert len(set(seeds[:4])) == 4
    assert seeds[4:] == seeds[:2]


async def test_rollouts_follow_the_current_adapter_unless_they_keep_to_one(
    gateway: Gateway, client: SamplingClient, fake: FakeVllm, tmp_path: Any
) -> None:
    one, two = (AdapterRef(path=tmp_path / str(version), policy_version=version) for version in (1, 2))
    await client.publish(one)
    gateway.open_rollout("training")
    gateway.open_rollout("evaluation", adapter=one)
    await gateway.openai_client("training").responses.create(model="policy", input="hi")
    await client.publish(two)
    for rollout_id in ("training", "evaluation"):
        await gateway.openai_client(rollout_id).responses.create(model="policy", input="hi")
    assert [request["model"] for request in fake.requests] == [
        "policy-000001-run",
        "policy-000002-run",
        "policy-000001-run",
    ]
    assert [turn.policy_version for turn in gateway.close_rollout("training")] == [1, 2]
    assert [turn.policy_version for turn in gateway.close_rollout("evaluation")] == [1]


async def test_a_request_under_way_when_its_rollout_closes_is_not_recorded(gateway: Gateway, fake: FakeVllm) -> None:
    gateway.open_rollout("gone")
    fake.gate = asyncio.Event()
    asking = asyncio.create_task(gateway.openai_client("gone").responses.create(model="policy", input="hi"))
    await fake.has_arrived.wait()
    turns = gateway.close_rollout("gone")
    fake.gate.set()
    await asking
    assert turns == ()


async def test_an_agent_without_tools_reads_calls_out_of_the_text_and_its_history_stays_exact(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm
) -> None:
    fake.answers.append(CLICK)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = await agent.chat.completions.create(model="policy", messages=messages)
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "done"}]
    await agent.chat.completions.create(model="policy", messages=messages)

    assert first.choices[0].message.content == CLICK
    assert first.choices[0].message.tool_calls is None
    before, after = gateway.turns("r1")
    whole = before.prompt.token_ids(0) + list(before.sampled_tokens)
    assert after.prompt.token_ids(0)[: len(whole)] == whole
    assert before.failure is None


async def test_a_thought_that_was_cut_off_is_no_answer_for_an_agent_without_tools(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm
) -> None:
    fake.answers.append("<think>\nIt may be 42 or <tool_call>")
    answer = await agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])

    message = answer.choices[0].message.model_dump()
    assert (message["content"], message["reasoning_content"]) == ("", "It may be 42 or <tool_call>")
    (turn,) = gateway.turns("r1")
    assert turn.failure is not None


async def test_the_model_is_found_by_its_name(agent: AsyncOpenAI) -> None:
    assert (await agent.models.retrieve("policy")).id == "policy"


async def test_a_thought_that_was_cut_off_comes_back_exactly_through_chat(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm
) -> None:
    fake.answers.append("<think>\nPhone Mail")
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = await agent.chat.completions.create(model="policy", messages=messages, tools=[CHAT_TOOL])
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    await agent.chat.completions.create(model="policy", messages=messages, tools=[CHAT_TOOL])

    before, after = gateway.turns("r1")
    whole = before.prompt.token_ids(0) + list(before.sampled_tokens)
    assert after.prompt.token_ids(0)[: len(whole)] == whole


async def test_a_history_that_is_sent_again_is_decoded_once_per_screenshot(
    agent: AsyncOpenAI, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []

    def count(text: str, *, validate: bool) -> bytes:
        decoded.append(text)
        return b64decode(text, validate=validate)

    monkeypatch.setattr("cua_rl.renderers.image_urls.b64decode", count)
    screens = [encode_image(make_image(64, 96 + side)) for side in range(4)]
    items: list[Any] = []
    for screen in screens:
        url = f"data:image/png;base64,{b64encode(screen).decode()}"
        items.append({"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]})
        response = await agent.responses.create(model="policy", input=items, tools=[TOOL])
        items += [item.to_dict() for item in response.output]

    assert len(decoded) == 4 + (1 + 2 + 3 + 4)  # the gateway once each; the fake server, which runs here, whenever sent
    prompts = [turn.prompt.images for turn in gateway.turns("r1")]
    assert [image.data for image in prompts[-1]] == screens
    assert all(images == prompts[-1][: len(images)] for images in prompts)
