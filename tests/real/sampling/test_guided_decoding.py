"""Forced calls and formats on a real vLLM: the trainer's log-probabilities are the sampler's, as it masks alike."""

import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rl.datums import build_datums
from cua_rl.rl.parity import measure_parity
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import VllmServer
from cua_rl.training.config import LossConfig, TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.rollout import AdapterRef, Datum, ModelTurn, SamplingParams
from tests.builders import rollout
from tests.real.training.trainer_calls import STEP, forward, train
from tests.renderers.generated import encode_image, make_image

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPERATURE = 0.8
LIMIT, FAR = 1e-4, 0.3
"""Mean difference of log-probabilities that rounding explains in float32, nats, and one that it does not."""
PLACE: Any = {
    "type": "object",
    "properties": {
        "side": {"enum": ["left", "right"]},
        "row": {"type": "integer", "minimum": 0, "maximum": 99},
        "why": {"type": "string", "pattern": "^[a-z]{0,6}$"},  # strings of a length may hold control characters
    },
    "required": ["side", "row", "why"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}
CLICK: Any = {"name": "click", "description": "Tap", "parameters": PLACE}
TOOL: Any = {"type": "function", "strict": False, **CLICK}
CHAT_TOOL: Any = {"type": "function", "function": CLICK}
CLAUDE_TOOL: Any = {"name": "click", "description": "Tap", "input_schema": PLACE}


@pytest.fixture(scope="module")
def trainer(tiny_model: Path) -> Trainer:
    return Trainer(TrainerConfig(model_path=tiny_model, lora_rank=8, lora_alpha=8, max_restarts=0))


@pytest_asyncio.fixture(loop_scope="session")
async def client(vllm: VllmServer) -> AsyncGenerator[SamplingClient]:
    async with SamplingClient(vllm, namespace="guided") as client:
        yield client


@pytest.fixture
def gateway(client: SamplingClient, tiny_renderer: Qwen3VLRenderer) -> Gateway:
    return Gateway(client, tiny_renderer, SamplingParams(max_tokens=200, temperature=TEMPERATURE, seed=5))


def picture(seed: int) -> str:
    return b64encode(encode_image(make_image(192, 320, seed))).decode()


def seen(seed: int) -> Any:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture(seed)}", "detail": "auto"}
    return {"role": "user", "content": [{"type": "input_text", "text": f"Step {seed}."}, image]}


async def ask_by_responses(gateway: Gateway, name: str, num_turns: int = 4) -> Sequence[ModelTurn]:
    """Turns that are held to a format, to a call, to nothing, and to one of both."""
    gateway.open_rollout(name)
    agent, items = gateway.openai_client(name), list[Any]()
    forms: list[dict[str, Any]] = [
        {"text": {"format": FORMAT}, "tool_choice": "none"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"max_output_tokens": 20},
        {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 40},
    ]
    for step in range(num_turns):
        items.append(seen(step))
        response = await agent.responses.create(model="policy", input=items, tools=[TOOL], **forms[step])
        items += [item.to_dict() for item in response.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
            for item in response.output
            if item.type == "function_call"
        ]
    return gateway.close_rollout(name)


async def ask_by_chat(gateway: Gateway, name: str) -> Sequence[ModelTurn]:
    gateway.open_rollout(name)
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(7)}"}}
    await gateway.openai_client(name).chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": [url, {"type": "text", "text": "Where?"}]}],  # type: ignore[list-item]
        tools=[CHAT_TOOL],
        tool_choice={"type": "function", "function": {"name": "click"}},
    )
    return gateway.close_rollout(name)


async def ask_by_messages(gateway: Gateway, name: str) -> Sequence[ModelTurn]:
    gateway.open_rollout(name)
    access = gateway.access(name)
    assert access is not None
    source = {"type": "base64", "media_type": "image/png", "data": picture(8)}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "Where?"}]
    common: Any = {"model": "claude", "max_tokens": 200, "messages": [{"role": "user", "content": content}]}
    async with (
        gateway.serve() as url,
        anthropic.AsyncAnthropic(base_url=f"{url}/rollouts/{name}", api_key=access.api_key, max_retries=0) as claude,
    ):
        await claude.messages.create(**common, tools=[CLAUDE_TOOL], tool_choice={"type": "any"})
        await claude.messages.create(
            **common, extra_body={"output_config": {"format": {"type": "json_schema", "schema": PLACE}}}
        )
    return gateway.close_rollout(name)


async def sample(gateway: Gateway, renderer: Qwen3VLRenderer, prefix: str) -> list[Datum]:
    datums: list[Datum] = []
    for advantage, ask in ((1.0, ask_by_responses), (-0.5, ask_by_chat), (0.7, ask_by_messages)):
        name = f"{prefix}-{ask.__name__}"
        turns = await ask(gateway, name)
        built = build_datums(rollout(*turns, rollout_id=name), advantage, renderer.image_token_id).datums
        for turn in turns:
            assert turn.prompt_matches_renderer
            if turn.grammar and turn.stop == "stop" and "json_object" not in str(turn.request):
                require_form(renderer, turn)
        datums += built
    return datums


def require_form(renderer: Qwen3VLRenderer, turn: ModelTurn) -> None:
    """The answer is calls of the tool, or an object of its schema."""
    parsed = renderer.parse(turn.text)
    assert parsed.failure is None
    assert {call.name for call in parsed.tool_calls} <= {"click"}
    for given in [call.arguments for call in parsed.tool_calls] or [turn.text]:
        place = json.loads(given)
        assert place.keys() == {"side", "row", "why"}
        assert place["side"] in ("left", "right")
        assert 0 <= place["row"] <= 99
        assert len(place["why"]) <= 6


def differences(trainer: Trainer, datums: Sequence[Datum]) -> tuple[float, float]:
    """Mean difference between sampler and trainer, with the masks and without."""
    plain = [replace(datum, grammars=()) for datum in datums]
    masked, unmasked = (
        measure_parity(part, [row.tolist() for row in forward(trainer, part, TEMPERATURE)], None)
        for part in (datums, plain)
    )
    return masked.mean_abs, unmasked.mean_abs


async def test_turns_that_are_held_to_a_form_train_exactly_and_would_not_without_the_masks(
    gateway: Gateway, client: SamplingClient, trainer: Trainer, tiny_renderer: Qwen3VLRenderer, tmp_path: Path
) -> None:
    before = await sample(gateway, tiny_renderer, "base")
    assert sum(len(datum.policy_versions) for datum in before) == 7
    assert sum(len(datum.grammars) for datum in before) == 6
    assert all(datum.model_input.images for datum in before)
    masked, plain = differences(trainer, before)
    assert masked < LIMIT
    assert plain > FAR

    output = train(trainer, before, LossConfig(name="importance_sampling", temperature=TEMPERATURE))
    ratios = [output.metrics[f"policy/ratio_{name}"] for name in ("min", "max")]
    assert ratios == pytest.approx([1.0, 1.0], abs=10 * LIMIT)
    trainer.optim_step(STEP)
    trainer.save_weights_for_sampler(tmp_path / "adapter")
    await client.publish(AdapterRef(path=tmp_path / "adapter", policy_version=1))
    after = await sample(gateway, tiny_renderer, "trained")
    masked, plain = differences(trainer, after)
    assert masked < LIMIT
    assert plain > FAR
    assert {version for datum in after for version in datum.policy_versions} == {1}


REFUSED: dict[str, Any] = {
    "a type that does not exist": {"type": "strange"},
    "a reference to nothing": {"$ref": "#/$defs/missing"},
    "no value left": {"enum": []},
    "a pattern that is none": {"type": "string", "pattern": "("},
    "properties that are none": {"type": "object", "properties": 5},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_schema_that_cannot_be_enforced_is_a_refusal_with_a_sentence(gateway: Gateway, name: str) -> None:
    rollout_id = f"refused-{name}"
    gateway.open_rollout(rollout_id)
    agent = gateway.openai_client(rollout_id)
    tool: Any = {"type": "function", "name": "click", "parameters": {"properties": {"x": REFUSED[name]}}}
    form: Any = {"type": "json_schema", "name": "x", "schema": REFUSED[name]}
    for more in ({"text": {"format": form}}, {"tools": [tool], "tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match="that xgrammar can enforce, got others"):
            await agent.responses.create(model="policy", input="hi", **more)  # type: ignore[arg-type]
    assert (await agent.responses.create(model="policy", input="hi", max_output_tokens=4)).output
    assert len(gateway.close_rollout(rollout_id)) == 1
