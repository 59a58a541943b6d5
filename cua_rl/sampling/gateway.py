"""The recording gateway: every agent reaches the model through it, and it records the training data.

Every rollout has its own OpenAI-compatible address. The gateway requests all tokens with their log-probabilities from
the model server, records the turn, and returns a plain OpenAI answer to the agent.

    agent ── Responses or Chat JSON ──► items ──► earlier answers as sampled ──► model server
      ▲                                                                              │ prompt ids, tokens, log-probs
      └── reasoning, message, function_call items ◄── parsed text ◄── ModelTurn kept ◄┘
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from cua_rl.agent.agent import ModelAddress
from cua_rl.agent.offered_device import OfferedDevice
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.host.http_server import serve_app
from cua_rl.host.request_limits import host_name
from cua_rl.renderers.answer_form import AnswerForm, read_form
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.images import ImageSettings
from cua_rl.renderers.openai_items import Conversation, StoredItems, conversation_from_chat, conversation_from_responses
from cua_rl.renderers.renderer import Renderer
from cua_rl.renderers.request_error import ContextOverflow, RequestError
from cua_rl.sampling.computer_tool import ComputerTool
from cua_rl.sampling.gateway_app import (
    IN_PROCESS_HOST,
    RolloutAccess,
    UnknownRollout,
    in_process_client,
    make_gateway_app,
)
from cua_rl.sampling.gateway_devices import device_routes
from cua_rl.sampling.gateway_images import ImageFetcher
from cua_rl.sampling.history_replay import EarlierAnswer, replay_answers
from cua_rl.sampling.ignored_fields import Api, IgnoredFields
from cua_rl.sampling.messages_api import responses_request
from cua_rl.sampling.openai_answers import Answer, items_by_id, response_object
from cua_rl.sampling.replica import RequestRejected, advice_for
from cua_rl.sampling.sampler import Sampled, Sampler, TurnRequest
from cua_rl.sampling.vllm_responses import first_difference, rebuild_prompt, sampling_request
from cua_rl.types.conversation import EncodedImage, Item, ParsedAnswer, SampledAnswer, Tool
from cua_rl.types.errors import ConfigError, SamplingError
from cua_rl.types.json_values import Json
from cua_rl.types.rollout import AdapterRef, EncodedTextChunk, ModelInput, ModelTurn, SamplingParams, Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""The model name that agents see, whichever adapter serves them."""
_REFUSALS_OF_GRAMMARS = ("structural tag", "JSON schema")
"""Parts of vLLM's messages."""


@dataclass(slots=True)
class _OpenRollout:
    params: SamplingParams
    adapter: AdapterRef | None
    turns: list[ModelTurn] = field(default_factory=list[ModelTurn])
    answers: list[EarlierAnswer] = field(default_factory=list[EarlierAnswer])
    stored: StoredItems = field(default_factory=StoredItems)
    prompt_texts: dict[str, EncodedTextChunk] = field(default_factory=dict[str, EncodedTextChunk])  # of the last one
    failures: dict[str, str] = field(default_factory=dict[str, str])  # of calls of the computer tool, by id
    num_requests: int = 0
    num_under_way: int = 0
    watch: RolloutWatch | None = None
    device: OfferedDevice | None = None
    told: Sequence[ModelTurn] = ()
    arrival: ModelTurn | None = None
    access: RolloutAccess = field(default_factory=RolloutAccess)

    def told_again(self, rendered: ModelInput) -> ModelTurn | None:
        """The turn that is told instead of sampling one, if any; raises `SamplingError` if its parent's had another
        prompt.
        """
        place = len(self.turns)
        known = (*self.told, self.arrival)[place] if place <= len(self.told) else None
        if known is not None and known.prompt_matches_renderer and known.prompt != rendered:
            raise SamplingError(
                f"expected the parent's prompt of turn {place + 1} again, got another: the agent or its environment is "
                "not reproducible; set branching.num_siblings=0, or take over at turn 1"
            )
        return known if place < len(self.told) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    turn: TurnRequest
    request: Mapping[str, object]
    conversation: Conversation
    computer: ComputerTool | None
    form: AnswerForm
    to_store: tuple[Item, ...] | None
    """The conversation without instructions, if later requests may refer to it."""
    ignored: tuple[str, ...]
    """Fields of the agent's own request that have no effect."""


class Gateway:
    """One OpenAI address per open rollout, over one sampler."""

    def __init__(
        self,
        client: Sampler,
        renderer: Renderer,
        params: SamplingParams,
        *,
        public_url: str | None = None,
        images: ImageFetcher | None = None,
        max_image_characters: int = 512 * 2**20,
    ) -> None:
        # imported here because it takes two seconds, too long for `--help` and for the first rollout
        import_module("openai.resources.responses")
        self._client = client
        self._renderer = renderer
        self._params = params
        self._public_url = public_url
        self._images = images or ImageFetcher()
        self._max_image_characters = max_image_characters  # of a rollout, also of requests that were refused
        self._url: str | None = None
        self._rollouts: dict[str, _OpenRollout] = {}
        self._ignored = IgnoredFields()
        self._hosts = {IN_PROCESS_HOST, *([host_name(public_url)] if public_url else [])}
        devices = device_routes(self.find_device, self.image_urls, self._hosts)
        self.app = make_gateway_app(self, MODEL_NAME, devices, hosts=self._hosts)
        self.num_requests = 0
        """Answers so far."""
        self.prompt_mismatches = 0
        """Answers for which the server's prompt tokens differed from the renderer's."""

    @property
    def image_settings(self) -> ImageSettings:
        """How the model's screenshots are resized."""
        settings = self._renderer.image_settings
        assert settings is not None, "expected the renderer of a model that sees screenshots"
        return settings

    def open_rollout(
        self, rollout_id: str, *, params: SamplingParams | None = None, adapter: AdapterRef | None = None
    ) -> None:
        """Open the address of a rollout, which uses the given adapter or, without one, always the current policy."""
        if rollout_id in self._rollouts:
            raise ValueError(f"expected a new rollout, got {rollout_id!r}, which is open; give each its own id")
        self._rollouts[rollout_id] = _OpenRollout(params or self._params, adapter)
        if adapter is not None:
            self._client.pin(adapter)

    def tell(self, rollout_id: str, turns: Sequence[Turn], arrival: Turn | None) -> None:
        """Answer the first requests of a rollout as in these turns, which must have the same prompts.

        The next request must have the prompt of `arrival`, if that is known.
        """
        rollout = self._open(rollout_id)
        rollout.told = [turn.model for turn in turns]
        rollout.arrival = None if arrival is None else arrival.model

    def close_rollout(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        """Close the address of a rollout and return its turns; requests in progress are not recorded."""
        rollout = self._open(rollout_id)
        del self._rollouts[rollout_id]
        if rollout.adapter is not None:
            self._client.unpin(rollout.adapter)
        self._client.forget(rollout_id)
        return tuple(rollout.turns)

    def turns(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        return tuple(self._open(rollout_id).turns)

    def image_url_of(self, rollout_id: str) -> Callable[[EncodedImage], str]:
        return self._open(rollout_id).access.images.name

    def image_urls(self, rollout_id: str) -> ImageUrls:
        """The images of a rollout, for agents in other processes."""
        return self._open(rollout_id).access.images

    async def respond(self, rollout_id: str, request: Json) -> Json:
        return response_object(await self.answer(rollout_id, request, "responses"), request)

    def openai_client(self, rollout_id: str) -> "AsyncOpenAI":
        """A client in this process, which is answered as agents in other processes are."""
        return in_process_client(self.app, rollout_id, self._open(rollout_id).access.api_key)

    def access(self, rollout_id: str) -> RolloutAccess | None:
        """Key and body budget of a rollout; None if no such rollout is open."""
        rollout = self._rollouts.get(rollout_id)
        return None if rollout is None else rollout.access

    @asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
        """Serve agents in other processes; yields the root address of `/rollouts/<rollout_id>/v1`."""
        self._hosts.add(host)
        async with serve_app(self.app, host, port) as url:
            self._url = self._public_url or url
            try:
                yield url
            finally:
                self._url = None

    @contextmanager
    def expose(
        self, rollout_id: str, watch: RolloutWatch, device: OfferedDevice | None = None
    ) -> Generator[ModelAddress]:
        """As in `ModelAccess`; raises `ConfigError` unless the gateway is served."""
        if self._url is None:
            raise ConfigError("expected a gateway that agents can reach, got one that is not served; serve it")
        rollout = self._open(rollout_id)
        rollout.watch, rollout.device = watch, device
        try:
            yield ModelAddress(url=f"{self._url.rstrip('/')}/rollouts/{rollout_id}", api_key=rollout.access.api_key)
        finally:
            rollout.device = None
            watch.close()  # it stays set, so that further requests of the agent are refused

    def find_device(self, rollout_id: str, token: str) -> OfferedDevice | None:
        """The device offered in a rollout, if the token is valid for it."""
        rollout = self._rollouts.get(rollout_id)
        device = rollout.device if rollout else None
        return device if device is not None and device.accepts(token) else None

    async def answer(self, rollout_id: str, request: Mapping[str, Any], api: Api, *, is_trained: bool = True) -> Answer:
        """Answer a request of an agent. The answer is recorded as a turn if `is_trained`.

        Raises `UnknownRollout` if no such rollout is open, `RolloutOver` if the rollout gets no more answers,
        `RequestError` if the request cannot be rendered for the model, `ContextOverflow` if prompt and answer would
        exceed the model's context, `SamplingError` if the model server failed.
        """
        rollout = self._open(rollout_id)
        watch = rollout.watch
        if watch is not None:
            watch.admit(len(rollout.turns) + rollout.num_under_way if is_trained else 0)
        with nullcontext() if watch is None else watch.clock.call():
            rollout.num_under_way += is_trained
            try:
                with nullcontext() if watch is None else watch.clock.uncharged():
                    answer, to_store = await self._answer(rollout_id, rollout, request, api, is_trained=is_trained)
            except ContextOverflow:
                if watch is not None and is_trained:  # other requests are not the policy's work
                    watch.is_out_of_context = True
                raise
            except (SamplingError, ConfigError) as error:
                if watch is not None and not isinstance(error, RequestRejected):
                    watch.fail(error)
                raise
            finally:
                rollout.num_under_way -= is_trained
            self.num_requests += 1
            if to_store is not None:
                sampled = SampledAnswer(text=answer.turn.text)
                rollout.stored.conversations[answer.turn.response_id] = (*to_store, sampled)
                rollout.stored.items.update(items_by_id(answer))
            if is_trained:
                rollout.turns.append(answer.turn)
                rollout.answers.append(EarlierAnswer(text=answer.turn.text, parsed=answer.parsed))
                if watch is not None:
                    await watch.answered(answer.turn)
        return answer

    async def _answer(
        self, rollout_id: str, rollout: _OpenRollout, request: Mapping[str, Any], api: Api, *, is_trained: bool
    ) -> tuple[Answer, tuple[Item, ...] | None]:
        rollout.num_requests += 1
        # rollouts have different seeds already; their requests need different ones too
        params = rollout.params.seeded(rollout.num_requests)
        started_at, clock = time.time(), time.monotonic()
        sent = request
        if api == "messages":
            request = await asyncio.to_thread(responses_request, request)
        request = await self._images.inline(request)
        prompt = await asyncio.to_thread(self._prepare, rollout, request, sent, api, params)
        max_tokens = prompt.turn.params.max_tokens
        if prompt.turn.prompt.length + max_tokens > self._client.max_model_len:
            raise ContextOverflow(
                f"expected at most {self._client.max_model_len} tokens, got a prompt of "
                f"{prompt.turn.prompt.length} and {max_tokens} for the answer; shorten the history or serve the model "
                "with more"
            )
        told = rollout.told_again(prompt.turn.prompt) if is_trained else None
        if told is not None:
            sampled, adapter = self._sampled_before(told), None
        else:
            sampled, adapter = await self._sample(rollout_id, rollout, prompt)
        text, parsed = self._read(sampled, rollout, prompt)
        matches, model_input = self._compare(rollout_id, prompt.turn.prompt, sampled)
        turn = told or ModelTurn(
            response_id=f"resp_{uuid4().hex}",
            prompt=model_input,
            sampled_tokens=sampled.tokens,
            sampling_logprobs=sampled.logprobs,
            policy_version=adapter.policy_version if adapter else 0,
            stop="stop" if sampled.is_complete else "length",
            text=text,
            failure=parsed.failure,
            prompt_matches_renderer=matches,
            request=prompt.request,
            started_at=started_at,
            duration_s=time.monotonic() - clock,
            cached_tokens=sampled.cached_tokens,
            grammar=prompt.turn.params.grammar,
        )
        answer = Answer(
            turn=turn,
            parsed=parsed,
            model=MODEL_NAME,
            num_prompt_tokens=len(sampled.prompt_ids),
            num_sampled_tokens=len(sampled.tokens),
            ignored=prompt.ignored,
        )
        return answer, prompt.to_store

    def _open(self, rollout_id: str) -> _OpenRollout:
        if rollout_id not in self._rollouts:
            raise UnknownRollout(rollout_id)
        return self._rollouts[rollout_id]

    def _prepare(self, rollout: _OpenRollout, request: Json, sent: Json, api: Api, params: SamplingParams) -> _Prompt:
        """Parse the request and render its prompt; runs in a thread, because the time grows with the request.

        `sent` is the request as the agent wrote it, in its own API.
        """
        is_responses = api != "chat"
        computer = ComputerTool.find(request) if is_responses else None
        if computer is not None:
            request = computer.read(request, rollout.failures)
        images = rollout.access.images
        if images.num_characters > self._max_image_characters:
            images.forget_urls()
        if is_responses:
            conversation = conversation_from_responses(request, images, rollout.stored)
        else:
            conversation = conversation_from_chat(request, images)
        if not conversation.items:
            field = "input" if is_responses else "messages"
            raise RequestError(expected=f"a conversation in {field}", got="none", do=f"send {field}")
        # an item has at least one token; the search below would take minutes for hundreds of thousands of items
        if len(conversation.items) > self._client.max_model_len:
            raise ContextOverflow(
                f"expected at most {self._client.max_model_len} tokens, got {len(conversation.items)} items; shorten "
                "the history"
            )
        items = replay_answers(conversation.items, rollout.answers, conversation.stops)
        form = read_form(request, conversation.tools, is_chat=not is_responses)
        params = self._renderer.restrict(conversation.limit(params), form)
        rendered = self._renderer.render(
            items, form.tools, max_tokens=self._client.max_model_len, known=rollout.prompt_texts
        )
        ends = self._renderer.stop_token_ids
        payload = sampling_request(*self._renderer.to_send(items, form.tools), params, ends)
        return _Prompt(
            turn=TurnRequest(prompt=rendered, payload=payload, params=params),
            request=images.without_images(request),
            conversation=conversation,
            computer=computer,
            form=form,
            # instructions are not inherited from the previous response, as with OpenAI
            to_store=items[bool(request.get("instructions")) :] if is_responses else None,
            ignored=self._ignored.find(sent, api, rollout.params, form),
        )

    def _sampled_before(self, told: ModelTurn) -> Sampled:
        return Sampled(
            prompt_ids=tuple(told.prompt.token_ids(self._renderer.image_token_id)),
            tokens=told.sampled_tokens,
            logprobs=told.sampling_logprobs,
            is_complete=told.stop == "stop",
            cached_tokens=told.cached_tokens,
        )

    async def _sample(
        self, rollout_id: str, rollout: _OpenRollout, prompt: _Prompt
    ) -> tuple[Sampled, AdapterRef | None]:
        try:
            return await self._client.sample_turn(prompt.turn, adapter=rollout.adapter, sticky_key=rollout_id)
        except RequestRejected as rejected:
            if "maximum context length" in rejected.message:
                raise ContextOverflow(rejected.message) from rejected
            if prompt.turn.params.grammar and any(word in rejected.message for word in _REFUSALS_OF_GRAMMARS):
                raise RequestError(
                    expected="schemas of the text, or of the tools that must be called, that xgrammar can enforce",
                    got=f"others ({rejected.message})",
                    do="simplify them",
                ) from rejected
            has_adapter = (rollout.adapter or self._client.current) is not None
            if (advice := advice_for(rejected, has_adapter=has_adapter)) is not None:
                rendered = prompt.turn.prompt
                raise ConfigError(
                    "expected a model server that accepts every prompt of this configuration, but it refused one with "
                    f"{len(rendered.images)} images and {rendered.length} tokens: {rejected.message} "
                    f"({rejected.status}); {advice}"
                ) from rejected
            raise
        finally:
            if rollout_id not in self._rollouts:  # closed meanwhile: a retry may have assigned it a replica again
                self._client.forget(rollout_id)

    def _read(self, sampled: Sampled, rollout: _OpenRollout, prompt: _Prompt) -> tuple[str, ParsedAnswer]:
        """As `read_answer`, with a unique id per tool call; the request's stops are in the text: they were sampled."""
        stops, tools, computer = prompt.conversation.stops, prompt.form.tools, prompt.computer
        if not sampled.tokens:
            raise SamplingError("expected at least one sampled token, got none; the request was aborted by the server")
        text, parsed = read_answer(self._renderer, sampled.tokens, tools, stops)
        if prompt.form.one_call:
            parsed = replace(parsed, tool_calls=parsed.tool_calls[:1])
        if computer is not None:
            earlier = (call for answer in rollout.answers for call in answer.parsed.tool_calls)
            parsed = computer.answer(parsed, prompt.conversation.items, earlier)
        calls = tuple(replace(call, call_id=f"call_{uuid4().hex}") for call in parsed.tool_calls)
        if computer is not None and parsed.failure is not None:
            rollout.failures |= {call.call_id: parsed.failure.message for call in calls}
        return text, replace(parsed, tool_calls=calls)

    def _compare(self, rollout_id: str, rendered: ModelInput, sampled: Sampled) -> tuple[bool, ModelInput]:
        """Whether the server's prompt equals the rendered one, and the prompt to train on, which is the server's."""
        image_token_id = self._renderer.image_token_id
        expected = rendered.token_ids(image_token_id)
        position = first_difference(expected, sampled.prompt_ids)
        if position is None:
            return True, rendered
        self.prompt_mismatches += 1
        if self.prompt_mismatches == 1:
            near = slice(max(0, position - 5), position + 5)
            logger.warning(
                "rollout_id=%s the server's prompt differs from the renderer's at token %d: server %r, renderer %r; "
                "the server's is trained on (further differences are counted, not logged)",
                rollout_id,
                position,
                self._renderer.decode(sampled.prompt_ids[near]),
                self._renderer.decode(expected[near]),
            )
        return False, rebuild_prompt(sampled.prompt_ids, rendered, image_token_id)


def read_answer(
    renderer: Renderer, tokens: Sequence[int], tools: Sequence[Tool], stops: Sequence[str] = ()
) -> tuple[str, ParsedAnswer]:
    """The sampled text without its end-of-turn token, and its parts, which end before the first of the stops.

    Without tools in the request, the text is returned as sampled: the agent described its tools in the prompt and
    parses calls itself. Truncated reasoning is not an answer.
    """
    text = renderer.decode(tokens[:-1] if tokens[-1] in renderer.stop_token_ids else tokens)
    kept = text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]
    parsed = renderer.parse(kept, tools)
    is_cut_off = parsed.reasoning is not None and "</think>" not in kept
    if not tools and not is_cut_off and (parsed.tool_calls or parsed.failure):
        parsed = ParsedAnswer(reasoning=None, text=kept, tool_calls=())
    return text, parsed
