"""Demonstrations: the real agent works on a device, and an expert answers in the model's place.

So what is imitated is byte for byte what the model will read and write in a rollout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from openai import AsyncOpenAI
from openai.types.responses import Response

from cua_rl.agent.agent import AgentTask, ModelAccess
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.conversation import Item, SampledAnswer, Tool
from cua_rl.devices.device import Device
from cua_rl.renderers.answers import parse_answer
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.openai_items import conversation_from_responses
from cua_rl.renderers.renderer import Renderer
from cua_rl.supervised.expert_answers import write_decision
from cua_rl.tasks.expert import Expert
from cua_rl.types import AgentTurn, Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation that ends with an answer; all its answers are to be imitated."""

    items: tuple[Item, ...]
    tools: tuple[Tool, ...]
    is_open: bool = False
    """The last answer would go on: its end of turn is not imitated."""
    answer: str | None = None
    """What the expert said at the end, for tasks that ask a question."""


async def demonstrate(instruction: str, device: Device, expert: Expert, *, max_turns: int) -> Demonstration:
    """Let the expert work on the device until it ends the task or has answered `max_turns` times."""
    model = _ExpertModel(device, expert)
    task = AgentTask(rollout_id="demonstration", instruction=instruction, max_turns=max_turns)
    outcome = await GBoxAgent().run(task, device, cast("ModelAccess", model), clock=RolloutClock(), on_turn=_ignore)
    return replace(model.demonstration(), answer=outcome.answer)


def build_supervised_datum(renderer: Renderer, demonstration: Demonstration, *, name: str) -> Datum:
    """The datum whose trained tokens are the answers."""
    model_input, loss_mask = renderer.render_supervised(demonstration.items, demonstration.tools)
    if demonstration.is_open:
        loss_mask = (*loss_mask[:-1], False)
    zeros = (0.0,) * model_input.length
    return Datum(
        rollout_id=name,
        model_input=model_input,
        loss_mask=loss_mask,
        advantages=zeros,
        sampling_logprobs=zeros,
        policy_versions=(),
    )


class _ExpertModel:
    """Stands in for gateway and OpenAI client: `openai_client(...).responses.create(...)` asks the expert."""

    def __init__(self, device: Device, expert: Expert) -> None:
        self._device = device
        self._expert = expert
        self._images = ImageUrls()
        self._request: Mapping[str, object] = {}
        self._answer = ""

    def openai_client(self, rollout_id: str) -> AsyncOpenAI:
        return cast(AsyncOpenAI, self)

    def image_urls(self, rollout_id: str) -> ImageUrls:
        return self._images

    @property
    def responses(self) -> Self:
        return self

    async def create(self, *, model: str, extra_body: Mapping[str, object]) -> Response:
        self._request = extra_body
        self._answer = write_decision(await self._expert(), await self._device.observe(), self._device.kind)
        return _response(self._answer, model)

    def demonstration(self) -> Demonstration:
        """The last request and its answer: the whole conversation."""
        conversation = conversation_from_responses(self._request, self._images)
        return Demonstration(items=(*conversation.items, SampledAnswer(text=self._answer)), tools=conversation.tools)


def _response(answer: str, model: str) -> Response:
    """An answer as the gateway would hand it to the agent."""
    parsed = parse_answer(answer)
    output: list[Mapping[str, Any]] = []
    if parsed.reasoning is not None:
        thought = {"type": "reasoning_text", "text": parsed.reasoning}
        output.append({"type": "reasoning", "id": "rs_0", "summary": [], "content": [thought]})
    for call in parsed.tool_calls:
        call_item = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        output.append({"type": "function_call", "id": call.call_id, "status": "completed", **call_item})
    return Response.model_validate(
        {
            "id": "expert",
            "object": "response",
            "created_at": 0,
            "model": model,
            "status": "completed",
            "output": output,
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
        }
    )


async def _ignore(turn: AgentTurn) -> None:
    """The conversation is all that is kept."""
