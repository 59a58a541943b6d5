"""Demonstrations: the real agent works on a device, and an expert answers instead of the model.

The imitated conversation is therefore the one that the model has in a rollout; the model's renderer writes its text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

from openai import AsyncOpenAI
from openai.types.responses import Response

from cua_rl.agent.agent import AgentTask, ModelAccess
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.conversation import Item, Reasoning, Tool, ToolCall
from cua_rl.devices.device import Device
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.openai_items import conversation_from_responses, responses_input
from cua_rl.renderers.renderer import Renderer
from cua_rl.supervised.expert_answers import build_answer
from cua_rl.tasks.expert import Expert
from cua_rl.types import AgentTurn, Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation that ends with an answer; all its answers are imitated."""

    items: tuple[Item, ...]
    tools: tuple[Tool, ...]
    is_open: bool = False
    """The last answer is incomplete: its end of turn is not imitated."""
    answer: str | None = None
    """The expert's final answer, for tasks that ask a question."""


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
        self._answer: tuple[Reasoning | ToolCall, ...] = ()

    def openai_client(self, rollout_id: str) -> AsyncOpenAI:
        return cast(AsyncOpenAI, self)

    def image_urls(self, rollout_id: str) -> ImageUrls:
        return self._images

    @property
    def responses(self) -> Self:
        return self

    async def create(self, *, model: str, extra_body: Mapping[str, object]) -> Response:
        self._request = extra_body
        self._answer = build_answer(await self._expert(), await self._device.observe(), self._device.kind)
        return _response(self._answer, model)

    def demonstration(self) -> Demonstration:
        """The last request and its answer: the whole conversation."""
        conversation = conversation_from_responses(self._request, self._images)
        return Demonstration(items=(*conversation.items, *self._answer), tools=conversation.tools)


def _response(answer: Sequence[Item], model: str) -> Response:
    """An answer in the gateway's format."""
    return Response.model_validate(
        {
            "id": "expert",
            "object": "response",
            "created_at": 0,
            "model": model,
            "status": "completed",
            "output": responses_input(answer),
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
        }
    )


async def _ignore(turn: AgentTurn) -> None:
    """A demonstration keeps only the conversation."""
