"""A scripted policy for databases that look like those of real runs: no model, no gateway."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from uuid import uuid4

from cua_rl.agent.agent import ModelAddress
from cua_rl.agent.offered_device import OfferedDevice
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.renderers.answers import parse_answer
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.openai_items import conversation_from_responses
from cua_rl.renderers.renderer import Renderer
from cua_rl.sampling.history_replay import EarlierAnswer, replay_answers
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.json_values import Json
from cua_rl.types.rollout import AdapterRef, ModelTurn, SamplingParams, Turn


class RandomTaps:
    """A policy behind the gateway's interface: taps somewhere, and now and then answers nonsense.

    `turn_s` is how long each answer takes; none at first. `done_share` is how often it says that it is done: never at
    first.
    """

    def __init__(self, renderer: Renderer, seed: int = 0) -> None:
        self._renderer = renderer
        self._random = random.Random(seed)
        self._turns: dict[str, list[ModelTurn]] = {}
        self._answers: dict[str, list[EarlierAnswer]] = {}
        self._images: dict[str, ImageUrls] = {}
        self.policy_version = 0
        self.turn_s = 0.0
        self.done_share = 0.0

    def open_rollout(
        self, rollout_id: str, *, params: SamplingParams | None = None, adapter: AdapterRef | None = None
    ) -> None:
        self._turns[rollout_id], self._answers[rollout_id], self._images[rollout_id] = [], [], ImageUrls()

    def tell(self, rollout_id: str, turns: Sequence[Turn], arrival: Turn | None) -> None:
        raise NotImplementedError("it taps somewhere else each time")

    def close_rollout(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        del self._answers[rollout_id], self._images[rollout_id]
        return tuple(self._turns.pop(rollout_id))

    def turns(self, rollout_id: str) -> tuple[ModelTurn, ...]:
        return tuple(self._turns[rollout_id])

    def image_url_of(self, rollout_id: str) -> Callable[[EncodedImage], str]:
        return self._images[rollout_id].name

    def expose(
        self, rollout_id: str, watch: RolloutWatch, device: OfferedDevice | None = None
    ) -> AbstractContextManager[ModelAddress]:
        raise NotImplementedError("only the built-in agent can act here")

    async def respond(self, rollout_id: str, request: Json) -> Json:
        """One answer, and its turn as the gateway would keep it."""
        await asyncio.sleep(self.turn_s)
        images = self._images[rollout_id]
        conversation = conversation_from_responses(request, images)
        items = replay_answers(conversation.items, self._answers[rollout_id])
        text = self._text()
        parsed = parse_answer(text)
        ids = [f"call_{uuid4().hex}" for _ in parsed.tool_calls]
        calls = tuple(replace(call, call_id=name) for call, name in zip(parsed.tool_calls, ids, strict=True))
        parsed = replace(parsed, tool_calls=calls)
        tokens = [*self._renderer.encode(text), self._renderer.stop_token_ids[0]]
        turn = ModelTurn(
            response_id=f"resp_{uuid4().hex}",
            prompt=self._renderer.render(items, conversation.tools),
            sampled_tokens=tuple(tokens),
            sampling_logprobs=tuple(-self._random.expovariate(3) for _ in tokens),
            policy_version=self.policy_version,
            stop="stop",
            text=text,
            failure=parsed.failure,
            prompt_matches_renderer=True,
            request=images.without_images(request),
            started_at=time.time(),
            duration_s=self._random.uniform(0.1, 0.9),
        )
        self._turns[rollout_id].append(turn)
        self._answers[rollout_id].append(EarlierAnswer(text=text, parsed=parsed))
        return _response(turn.response_id, parsed.reasoning, calls)

    def _text(self) -> str:
        if self._random.random() < 0.03:
            return _answer_text("Settings", '{"action": ')
        if self._random.random() < self.done_share:
            return _answer_text("Settings", '{"action": "terminate", "status": "success"}')
        x, y = (5 * self._random.randrange(5, 196) for _ in range(2))
        thought = " ".join(self._random.sample(["Phone", "Mail", "Clock", "Maps", "Notes", "Files", "Settings"], 3))
        arguments = f'{{"action": "click", "coordinate": [{x}, {y}]}}'
        if self._random.random() < 0.15:
            arguments = f'{{"action": "swipe", "coordinate": [{x}, 800], "coordinate2": [{x}, {y // 4}]}}'
        return _answer_text(thought, arguments)


def _answer_text(thought: str, arguments: str) -> str:
    call = f'{{"name": "mobile_use", "arguments": {arguments}}}'
    return f"<think>\n{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def _response(response_id: str, reasoning: str | None, calls: Sequence[Any]) -> Json:
    output: list[dict[str, Any]] = []
    if reasoning is not None:
        thought = {"type": "reasoning_text", "text": reasoning}
        output.append({"type": "reasoning", "id": "rs_0", "summary": [], "content": [thought]})
    output += [
        {
            "type": "function_call",
            "id": call.call_id,
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in calls
    ]
    body = {"id": response_id, "object": "response", "created_at": 0, "model": "policy", "output": output}
    rest: dict[str, Any] = {"parallel_tool_calls": False, "tool_choice": "auto", "tools": [], "status": "completed"}
    return body | rest
