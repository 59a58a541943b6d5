"""Evaluation of models behind OpenAI-compatible endpoints: takes the place of our gateway, without tokens."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self
from uuid import uuid4

from cua_rl.agent.agent import ModelAddress
from cua_rl.agent.offered_device import OfferedDevice
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.evaluation.openai_wire import Reply, chat_body, parse_chat_reply, parse_responses_reply, responses_body
from cua_rl.judge.judge import external_client
from cua_rl.renderers.answers import write_answer
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.openai_items import conversation_from_responses
from cua_rl.renderers.request_error import ContextOverflow
from cua_rl.sampling.gateway_app import UnknownRollout
from cua_rl.sampling.openai_answers import Answer, response_object
from cua_rl.sampling.replica import RequestRejected
from cua_rl.types.conversation import EncodedImage, Tool
from cua_rl.types.errors import ConfigError, SamplingError, boundary
from cua_rl.types.json_values import Json
from cua_rl.types.rollout import AdapterRef, ModelInput, ModelTurn, SamplingParams, Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

Api = Literal["responses", "chat"]
MAX_RETRIES = 5  # the openai package waits as long as the endpoint asks, or longer each time
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A model behind a third-party endpoint. The API key is read from the environment when it is used."""

    name: str
    base_url: str
    """Including `/v1`, or whatever path the endpoint uses."""
    model: str
    """The endpoint's own name of it."""
    api: Api = "responses"
    extra: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields set in every request; None removes one."""
    api_key_env: str | None = None


@dataclass(slots=True)
class _OpenRollout:
    params: SamplingParams
    turns: list[ModelTurn] = field(default_factory=list[ModelTurn])
    images: ImageUrls = field(default_factory=ImageUrls)


class EndpointAccess:
    """The model access of a `RolloutRunner` over an endpoint; an async context manager, which alone holds the key."""

    def __init__(self, model: RemoteModel, api_key: str, params: SamplingParams) -> None:
        self._model = model
        self._api_key = api_key
        self._params = params
        self._rollouts: dict[str, _OpenRollout] = {}
        self._client: AsyncOpenAI | None = None

    def open_rollout(
        self, rollout_id: str, *, params: SamplingParams | None = None, adapter: AdapterRef | None = None
    ) -> None:
        """Open a rollout's address; an endpoint cannot load adapters."""
        if adapter is not None:
            raise ValueError(f"expected no adapter at {self._model.base_url!r}, got {adapter.name!r}")
        self._rollouts[rollout_id] = _OpenRollout(params or self._params)

    def tell(self, rollout_id: str, turns: Sequence[Turn], arrival: Turn | None) -> None:
        raise ConfigError(f"expected no branches at {self._model.base_url!r}: only what is trained has any")

    def close_rollout(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        turns = self.turns(rollout_id)
        del self._rollouts[rollout_id]
        return turns

    def turns(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        """The turns of an open rollout so far, without tokens."""
        return tuple(self._open(rollout_id).turns)

    def image_url_of(self, rollout_id: str) -> Callable[[EncodedImage], str]:
        return self._open(rollout_id).images.name

    def expose(
        self, rollout_id: str, watch: RolloutWatch, device: OfferedDevice | None = None
    ) -> AbstractContextManager[ModelAddress]:
        """Raises `ConfigError`: only the built-in agent works with another model endpoint."""
        raise ConfigError(f"expected the built-in agent for {self._model.base_url!r}, got one in another process")

    async def respond(self, rollout_id: str, request: Json) -> Json:
        """Ask the endpoint in its own API and record the turn.

        Raises `ContextOverflow` if the conversation exceeds the model's context, `RequestRejected` if the endpoint
        rejects the request, `SamplingError` if it does not answer, or does not follow the API.
        """
        rollout = self._open(rollout_id)
        conversation = conversation_from_responses(request, rollout.images)
        make_body = responses_body if self._model.api == "responses" else chat_body
        body = make_body(conversation.items, conversation.tools, self._model.model, rollout.params)
        started_at, clock = time.time(), time.monotonic()
        reply = await self._ask(body, conversation.tools)
        parsed = reply.parsed
        turn = ModelTurn(
            response_id=f"resp_{uuid4().hex}",
            prompt=ModelInput(chunks=()),
            sampled_tokens=(),
            sampling_logprobs=(),
            policy_version=0,
            stop="stop" if reply.is_complete else "length",
            # for readers, in the form of Qwen3-VL: an endpoint does not say what its model wrote
            text=write_answer(reasoning=parsed.reasoning, text=parsed.text, tool_calls=parsed.tool_calls),
            failure=parsed.failure,
            prompt_matches_renderer=True,
            request=rollout.images.without_images(request),
            started_at=started_at,
            duration_s=time.monotonic() - clock,
            cached_tokens=reply.num_cached_tokens,
        )
        rollout.turns.append(turn)
        answer = Answer(
            turn=turn,
            parsed=parsed,
            model=self._model.model,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_sampled_tokens=reply.num_sampled_tokens,
        )
        return response_object(answer, request)

    async def _ask(self, body: Mapping[str, object], tools: Sequence[Tool]) -> Reply:
        from openai import APIStatusError, BadRequestError

        assert self._client is not None, "expected the endpoint to be entered first"
        is_responses = self._model.api == "responses"
        fields = {name: value for name, value in {**body, **self._model.extra}.items() if value is not None}
        try:
            with boundary(SamplingError, f"asking {self._model.base_url}"):
                try:
                    answer = await self._client.post(
                        "/responses" if is_responses else "/chat/completions", cast_to=object, body=fields
                    )
                except APIStatusError as error:
                    raise RequestRejected(error.status_code, error.message) from error
        except RequestRejected as rejected:
            cause = rejected.__cause__
            if isinstance(cause, BadRequestError) and (
                cause.code == "context_length_exceeded" or "context length" in cause.message
            ):
                raise ContextOverflow(rejected.message) from rejected
            raise
        return (parse_responses_reply if is_responses else parse_chat_reply)(answer, tools)

    def _open(self, rollout_id: str) -> _OpenRollout:
        if rollout_id not in self._rollouts:
            raise UnknownRollout(rollout_id)
        return self._rollouts[rollout_id]

    async def __aenter__(self) -> Self:
        self._client = external_client(
            self._model.base_url, self._api_key, max_retries=MAX_RETRIES, timeout_s=TIMEOUT_S
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._client is not None:
            await self._client.close()
