"""Agents through somebody else's OpenAI-compatible endpoint, for evaluation: no tokens, no log-probabilities.

It stands where the gateway stands for our own models, so that the same agent runs on both.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast
from uuid import uuid4

import httpx

from cua_rl.agent.offered_device import OfferedDevice
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.conversation import ParsedAnswer
from cua_rl.errors import ConfigError, SamplingError, boundary
from cua_rl.evaluation.openai_wire import Reply, chat_body, parse_chat_reply, parse_responses_reply, responses_body
from cua_rl.judge.judge import is_loopback
from cua_rl.renderers.answers import write_answer
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.openai_items import conversation_from_chat, conversation_from_responses
from cua_rl.sampling.client import RequestRejected
from cua_rl.sampling.gateway_app import make_gateway_app
from cua_rl.sampling.gateway_errors import ContextOverflow, UnknownRollout
from cua_rl.sampling.openai_answers import Answer
from cua_rl.types import AdapterRef, ModelInput, ModelTurn, SamplingParams

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

Api = Literal["responses", "chat"]
MAX_RETRIES = 5  # the openai package waits as the endpoint asks, or longer each time


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model of somebody else is asked."""

    base_url: str
    """With its `/v1`, or whatever the endpoint has there."""
    model: str
    api: Api = "responses"
    extra: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields set in every request; None takes one away."""


@dataclass(slots=True)
class _OpenRollout:
    params: SamplingParams
    turns: list[ModelTurn] = field(default_factory=list[ModelTurn])
    images: ImageUrls = field(default_factory=ImageUrls)


class EndpointAccess:
    """What a `RolloutRunner` needs of the gateway, over an endpoint; an async context manager.

    The API key is held here and in the request's header, nowhere else.
    """

    def __init__(self, endpoint: Endpoint, api_key: str, params: SamplingParams, *, timeout_s: float = 600.0) -> None:
        self._endpoint = endpoint
        self._api_key = api_key
        self._params = params
        self._timeout_s = timeout_s
        self._rollouts: dict[str, _OpenRollout] = {}
        self._app = make_gateway_app(self, endpoint.model)
        self._client: AsyncOpenAI | None = None

    def open_rollout(
        self, rollout_id: str, *, params: SamplingParams | None = None, adapter: AdapterRef | None = None
    ) -> None:
        """Open a rollout's address; the endpoint has no adapters of ours."""
        if adapter is not None:
            raise ValueError(f"expected no adapter at {self._endpoint.base_url!r}, got {adapter.name!r}")
        self._rollouts[rollout_id] = _OpenRollout(params or self._params)

    def close_rollout(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        """Close a rollout's address and take its turns."""
        turns = self.turns(rollout_id)
        del self._rollouts[rollout_id]
        return turns

    def turns(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        """The turns of an open rollout so far, without tokens."""
        return tuple(self._open(rollout_id).turns)

    def image_urls(self, rollout_id: str) -> ImageUrls:
        """The screenshots of an open rollout as its requests carry them."""
        return self._open(rollout_id).images

    def expose(
        self, rollout_id: str, watch: RolloutWatch, device: OfferedDevice | None = None
    ) -> AbstractContextManager[str]:
        """Raises `ConfigError`: only the built-in agent works with another model endpoint."""
        raise ConfigError(f"expected the built-in agent for {self._endpoint.base_url!r}, got one in another process")

    def openai_client(self, rollout_id: str) -> "AsyncOpenAI":
        """A client for a rollout in this process, as the gateway gives one."""
        from openai import AsyncOpenAI

        self._open(rollout_id)
        transport = httpx.ASGITransport(self._app)
        http_client = httpx.AsyncClient(transport=transport, trust_env=False, timeout=None)
        return AsyncOpenAI(
            base_url=f"http://endpoint/rollouts/{rollout_id}/v1",
            api_key="not-needed",
            max_retries=0,
            timeout=None,
            http_client=cast("Any", http_client),
        )

    async def answer(self, rollout_id: str, request: Mapping[str, Any], api: Api) -> Answer:
        """Ask the endpoint in its own API and keep the turn.

        Raises:
            ContextOverflow: the conversation does not fit into the model's context.
            RequestRejected: the endpoint refuses the request.
            SamplingError: it does not answer, or not as the API says.
        """
        rollout = self._open(rollout_id)
        read = conversation_from_responses if api == "responses" else conversation_from_chat
        conversation = read(request, rollout.images)
        make_body = responses_body if self._endpoint.api == "responses" else chat_body
        body = make_body(conversation.items, conversation.tools, self._endpoint.model, rollout.params)
        started_at, clock = time.time(), time.monotonic()
        reply = await self._ask(body)
        turn = _turn(reply, rollout.images.without_images(request), started_at, time.monotonic() - clock)
        rollout.turns.append(turn)
        return _answer(turn, reply, self._endpoint.model)

    async def _ask(self, body: Mapping[str, object]) -> Reply:
        from openai import APIStatusError, BadRequestError

        assert self._client is not None, "the endpoint was not entered"
        is_responses = self._endpoint.api == "responses"
        fields = {name: value for name, value in {**body, **self._endpoint.extra}.items() if value is not None}
        try:
            with boundary(SamplingError, f"asking {self._endpoint.base_url}"):
                try:
                    answer = await self._client.post(
                        "/responses" if is_responses else "/chat/completions", cast_to=object, body=fields
                    )
                except APIStatusError as error:
                    raise RequestRejected(error.status_code, error.message) from error
        except RequestRejected as rejected:
            if isinstance(rejected.__cause__, BadRequestError) and _is_overflow(rejected.__cause__):
                raise ContextOverflow(rejected.message) from rejected
            raise
        return parse_responses_reply(answer) if is_responses else parse_chat_reply(answer)

    def _open(self, rollout_id: str) -> _OpenRollout:
        if rollout_id not in self._rollouts:
            raise UnknownRollout(rollout_id)
        return self._rollouts[rollout_id]

    async def __aenter__(self) -> Self:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self._client = AsyncOpenAI(
            base_url=self._endpoint.base_url,
            api_key=self._api_key,
            max_retries=MAX_RETRIES,
            timeout=self._timeout_s,
            http_client=DefaultAsyncHttpxClient(trust_env=not is_loopback(self._endpoint.base_url)),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()


def _is_overflow(error: Any) -> bool:
    return error.code == "context_length_exceeded" or "context length" in str(error.message)


def _turn(reply: Reply, request: Mapping[str, object], started_at: float, duration_s: float) -> ModelTurn:
    parsed = reply.parsed
    text = write_answer(reasoning=parsed.reasoning, text=parsed.text, tool_calls=parsed.tool_calls)
    return ModelTurn(
        response_id=f"resp_{uuid4().hex}",
        prompt=ModelInput(chunks=()),
        sampled_tokens=(),
        sampling_logprobs=(),
        policy_version=0,
        stop="stop" if reply.is_complete else "length",
        text=text,
        failure=parsed.failure,
        prompt_matches_renderer=True,
        request=request,
        started_at=started_at,
        duration_s=duration_s,
        cached_tokens=reply.num_cached_tokens,
    )


def _answer(turn: ModelTurn, reply: Reply, model: str) -> Answer:
    parsed: ParsedAnswer = reply.parsed
    return Answer(
        response_id=turn.response_id,
        model=model,
        created_at=int(turn.started_at),
        parsed=parsed,
        is_complete=reply.is_complete,
        num_prompt_tokens=reply.num_prompt_tokens,
        num_cached_tokens=reply.num_cached_tokens,
        num_sampled_tokens=reply.num_sampled_tokens,
    )
