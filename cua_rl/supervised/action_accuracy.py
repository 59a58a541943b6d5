"""Action accuracy: the share of held-out turns whose greedy answer is the recorded action.

Each step is asked for behind the recorded conversation up to it. Clicks are right in the box of the element that is
aimed at, as in AndroidControl (arXiv:2406.03679), where a data set tells it. Else actions are compared by the rules of
Android in the Wild (arXiv:2307.10088; google-research, android_in_the_wild/action_matching.py), and by stricter ones
where it compares only types or axes.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import hypot
from statistics import fmean

from cua_rl.agent.device_step import cursor_after
from cua_rl.agent.tools import COMPUTER_USE, MOBILE_USE, parse_action
from cua_rl.renderers.renderer import Renderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.generation import GenerateParams
from cua_rl.types import actions
from cua_rl.types.actions import Action, Finish
from cua_rl.types.conversation import EncodedImage, ParseFailure
from cua_rl.types.rollout import Datum, EncodedTextChunk, ImageChunk, ModelInput

ANSWER_ROOM = 256
"""Tokens by which an answer may be longer than the recorded one."""
MAX_TAP_DISTANCE = 0.14
"""Between two taps at the same thing, in widths and heights of the screen."""
ACTION_ACCURACY = "eval/held_out/action_accuracy"
_AtPoint = actions.Click | actions.DoubleClick | actions.RightClick | actions.MoveMouse | actions.LongPress


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutStep:
    """A recorded answer that asks for an action of ours, and what precedes it."""

    prompt: ModelInput
    num_answer_tokens: int
    action: Action | Finish
    cursor: tuple[int, int] | None
    target_box: tuple[int, ...] = ()
    """Of the element that the action aims at: left, top, right, bottom in pixels of the screen; empty if not known."""

    @property
    def screen(self) -> EncodedImage:
        return self.prompt.images[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionExam:
    """Held-out steps, and the sampler that answers them."""

    steps: Sequence[HeldOutStep]
    renderer: Renderer
    sampler: SamplingClient

    async def take(self) -> dict[str, float]:
        """The metrics of the adapter that was published last; raises `SamplingError`."""
        given = await asyncio.gather(*map(self._answer, self.steps))
        pairs = list(zip(self.steps, given, strict=True))
        right = [
            (step.action, same_action(step.action, action, step.screen, step.target_box)) for step, action in pairs
        ]
        parts = {
            "": [is_right for _, is_right in right],
            "/type": [type(action) is type(step.action) for step, action in pairs],
            "/click": [is_right for action, is_right in right if isinstance(action, _AtPoint)],
            "/text": [is_right for action, is_right in right if isinstance(action, actions.TypeText)],
        }
        shares = {f"{ACTION_ACCURACY}{part}": fmean(counted) for part, counted in parts.items() if counted}
        return {**shares, "eval/held_out/num_actions": float(len(pairs))}

    async def _answer(self, step: HeldOutStep) -> Action | Finish | None:
        room = min(step.num_answer_tokens + ANSWER_ROOM, self.sampler.max_model_len - step.prompt.length)
        params = GenerateParams(max_tokens=room, temperature=0.0)
        image_token_id = self.renderer.image_token_id
        generated = await self.sampler.generate(step.prompt, params, image_token_id=image_token_id)
        return _read_action(self.renderer, generated.sequences[0].tokens, step.screen, step.cursor)


def held_out_steps(
    datums: Sequence[Datum], renderer: Renderer, boxes: Mapping[tuple[str, Action], tuple[int, ...]]
) -> Iterator[HeldOutStep]:
    """Every answer of these conversations that asks for one of our actions on a screenshot, in their order.

    `boxes` are those of the elements that are aimed at, by the sha256 of the screenshot and the action.
    """
    for datum in datums:
        ids, cursor = datum.model_input.token_ids(renderer.image_token_id), None
        for is_answer, run in groupby(range(len(ids)), datum.loss_mask.__getitem__):
            places = list(run)
            prompt, answer = _first_tokens(datum.model_input, places[0]), ids[places[0] : places[-1] + 1]
            if not is_answer or not prompt.images:
                continue
            action = _read_action(renderer, answer, prompt.images[-1], cursor)
            if action is not None:
                yield HeldOutStep(
                    prompt=prompt,
                    num_answer_tokens=len(answer),
                    action=action,
                    cursor=cursor,
                    target_box=() if isinstance(action, Finish) else boxes.get((prompt.images[-1].sha256, action), ()),
                )
                cursor = (None if isinstance(action, Finish) else cursor_after(action)) or cursor


def _first_tokens(whole: ModelInput, number: int) -> ModelInput:
    chunks: list[EncodedTextChunk | ImageChunk] = []
    for chunk in whole.chunks:
        if number > 0:
            is_image = isinstance(chunk, ImageChunk)
            chunks.append(chunk if is_image else EncodedTextChunk(tokens=chunk.tokens[:number]))
        number -= chunk.length
    return ModelInput(chunks=tuple(chunks))


def _read_action(
    renderer: Renderer, tokens: Sequence[int], screen: EncodedImage, cursor: tuple[int, int] | None
) -> Action | Finish | None:
    answer = renderer.parse(renderer.decode(tokens), (MOBILE_USE, COMPUTER_USE))
    if answer.failure is not None or not answer.tool_calls:
        return None
    call, width_px, height_px = answer.tool_calls[0], screen.width_px, screen.height_px
    action = parse_action(call, width_px=width_px, height_px=height_px, cursor=cursor)
    return None if isinstance(action, ParseFailure) else action


def same_action(
    recorded: Action | Finish, given: Action | Finish | None, screen: EncodedImage, target_box: Sequence[int] = ()
) -> bool:
    """Whether an answer does what was recorded: of one type, and where that has one, at one place, with one text.

    The place is the box of the element that is aimed at, if that is known.
    """
    if type(recorded) is not type(given):
        return False
    if isinstance(recorded, _AtPoint) and isinstance(given, _AtPoint):
        if target_box:
            left, top, right, bottom = target_box
            return left <= given.x <= right and top <= given.y <= bottom
        across, down = (recorded.x - given.x) / screen.width_px, (recorded.y - given.y) / screen.height_px
        return hypot(across, down) <= MAX_TAP_DISTANCE
    match recorded, given:
        case actions.Drag() as one, actions.Drag() as other:
            return _direction(one.to_x - one.x, one.to_y - one.y) == _direction(
                other.to_x - other.x, other.to_y - other.y
            )
        case actions.Scroll() as one, actions.Scroll() as other:
            return _direction(one.right_px, one.down_px) == _direction(other.right_px, other.down_px)
        case (
            (actions.TypeText(text=one), actions.TypeText(text=other))
            | (actions.OpenApp(name=one), actions.OpenApp(name=other))
            | (Finish(answer=str(one)), Finish(answer=str(other)))
        ):
            return one.strip().casefold() == other.strip().casefold()
        case actions.Wait(), actions.Wait():
            return True
        case _:
            return recorded == given


def _direction(right: int, down: int) -> tuple[bool, bool]:
    """Along which axis it mainly is, and whether towards right or bottom."""
    is_across = abs(right) > abs(down)
    return is_across, (right if is_across else down) > 0
