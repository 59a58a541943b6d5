"""Trajectories of other systems as rollouts: our agent on recorded screenshots, with recorded actions as answers.

Prompts and answers are therefore token for token what our agent reads and should write. Log-probabilities are 0,
because the answers were not sampled.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from typing import cast

from cua_rl.agent.tools import tool_for
from cua_rl.environments.device import DeviceKind
from cua_rl.exchange.foreign_actions import Arguments, NoCounterpart, UnknownAction, View, tool_arguments
from cua_rl.exchange.recorder import ForeignTrajectory
from cua_rl.exchange.records import RolloutRecord, TaskRecord
from cua_rl.renderers.renderer import Renderer
from cua_rl.supervised.demonstrations import AnswerItems, DemonstratedTurn, as_taught, demonstrate_turns
from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage, Reasoning, ToolCall
from cua_rl.types.errors import ConfigError, TaskError, boundary
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import ModelTurn, Reward, Rollout, StopReason, Turn

_REWARD = "imported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A trajectory as a rollout."""

    record: RolloutRecord
    ends_before: str | None
    """Name of the action that our tools lack, before which the rollout ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """An answer, the screen that it answers, and the one that it leads to; None if that was not recorded."""

    thought: str | None
    arguments: Arguments
    before: EncodedImage
    after: EncodedImage | None
    target_box: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class _RecordedDevice:
    """Shows what was recorded, whatever is done."""

    kind: DeviceKind
    calls: Sequence[_Call]
    index: int = 0
    """Index of the call that is being answered."""
    device_id: str = "recorded"

    async def observe(self) -> EncodedImage:
        """The screen before the call; the last one is shown again where none was recorded after it."""
        if self.index < len(self.calls):
            return self.calls[self.index].before
        return self.calls[-1].after or self.calls[-1].before

    async def execute(self, action: Action) -> None:
        """Go on to the next screen."""
        self.index += 1

    async def query(self, name: str) -> str:
        """Only screenshots were recorded."""
        raise TaskError(f"expected no queries of a recorded device, got {name!r}")

    async def close(self) -> None:
        """Nothing is held."""


async def replay(
    trajectory: ForeignTrajectory, renderer: Renderer, *, step: int, index: int, started_at: float
) -> Replayed:
    """The rollout of a trajectory, the group with this index of a step; raises `ConfigError` that names its place."""
    try:
        with boundary(ConfigError, "expected what a model can read and write"):
            return await _replay(trajectory, renderer, step=step, index=index, started_at=started_at)
    except NoCounterpart as error:
        raise NoCounterpart(f"{trajectory.where}: {error}", error.name) from None
    except ConfigError as error:
        kind = UnknownAction if isinstance(error, UnknownAction) else ConfigError
        raise kind(f"{trajectory.where}: {error}") from None


async def _replay(
    trajectory: ForeignTrajectory, renderer: Renderer, *, step: int, index: int, started_at: float
) -> Replayed:
    kind = trajectory.kind
    assert kind is not None  # of one that was read
    calls, ends_before = _read_calls(trajectory, kind)
    device = _RecordedDevice(kind=kind, calls=calls)
    answers = [as_taught(_answer(call, kind), renderer) for call in calls]

    async def answer(screen: EncodedImage) -> AnswerItems:
        return answers[device.index]

    demonstrated, outcome = await demonstrate_turns(trajectory.instruction, device, answer, max_turns=len(calls))
    for turn in demonstrated:
        if turn.agent.action_error is not None:
            raise UnknownAction(f"expected calls that our tools take, got {turn.answer!r}: {turn.agent.action_error}")
    # the same trajectory always becomes the same rollout
    name = sha256(f"{trajectory.where}/{trajectory.trajectory_id}".encode()).hexdigest()[:32]
    turns = tuple(
        _make_turn(turn, renderer, place, name, calls[place], started_at) for place, turn in enumerate(demonstrated)
    )
    task = TaskRecord(
        task_id=trajectory.trajectory_id,
        seed=0,
        instruction=trajectory.instruction,
        category="app",
        difficulty="medium",
        max_turns=len(calls),
        tags=("imported",) if ends_before is None else ("imported", "incomplete"),
    )
    told = "success" if trajectory.success else "failure"
    reward = 1.0 if trajectory.success else 0.0
    rollout = Rollout(
        rollout_id=name,
        task_id=task.task_id,
        seed=0,
        group_index=index,
        member_index=0,
        device_id=device.device_id,
        turns=turns,
        stop_reason=StopReason.FINISHED if outcome.success_claimed is not None else StopReason.MAX_TURNS,
        answer=outcome.answer,
        validation=Validation(query=_REWARD, expected="success", actual=told, success=trajectory.success),
        reward=Reward(total=reward, parts={_REWARD: reward}),
        error=None,
        started_at=started_at,
        duration_s=0.0,
        max_turns=len(calls),
    )
    record = RolloutRecord(
        phase="step",
        step=step,
        group_id=f"imported-{name}",
        task=task,
        rollout=rollout,
        advantage=0.0,
        training_logprobs=(None,) * len(turns),
    )
    return Replayed(record=record, ends_before=ends_before)


def _read_calls(trajectory: ForeignTrajectory, kind: DeviceKind) -> tuple[list[_Call], str | None]:
    """What our agent would have answered at each step; a trajectory that does not say its end gets one."""
    # They end before the first action that our tools lack: what was seen later did not follow from our actions.
    screens = [step.screen.load() for step in trajectory.steps]
    last = None if trajectory.last_screen is None else trajectory.last_screen.load()
    calls: list[_Call] = []
    cursor: list[int] | None = None
    for step, (screen, following) in zip(trajectory.steps, pairwise([*screens, last]), strict=True):
        assert screen is not None
        view = View(
            screen=screen,
            kind=kind,
            display=step.screen.display,
            cursor=cursor,
            wheel_click_px=trajectory.wheel_click_px,
        )
        try:
            parts = tool_arguments(step.action, view)
        except NoCounterpart as lacking:
            if not calls:
                raise
            return calls, lacking.name
        width, height = step.screen.display or (screen.width_px, screen.height_px)
        scales = (screen.width_px / width, screen.height_px / height) * 2
        box = tuple(round(side * scale) for side, scale in zip(step.box, scales, strict=bool(step.box)))
        for place, arguments in enumerate(parts):
            cursor = cast("list[int] | None", arguments.get("coordinate", cursor))
            is_last = place == len(parts) - 1
            calls.append(
                _Call(
                    thought=step.thought if place == 0 else None,
                    arguments=arguments,
                    before=screen,
                    after=following if is_last else screen,
                    target_box=box if "coordinate" in arguments else (),
                )
            )
        if parts and parts[-1]["action"] in ("terminate", "answer"):
            return calls, None
    if last is not None:
        status = "success" if trajectory.success else "failure"
        calls.append(_Call(thought=None, arguments={"action": "terminate", "status": status}, before=last, after=None))
    return calls, None


def _answer(call: _Call, kind: DeviceKind) -> AnswerItems:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    tool_call = ToolCall(call_id="imported", name=tool_for(kind).name, arguments=arguments)
    return (tool_call,) if call.thought is None else (Reasoning(text=call.thought), tool_call)


def _make_turn(
    turn: DemonstratedTurn, renderer: Renderer, index: int, name: str, call: _Call, started_at: float
) -> Turn:
    conversation = turn.conversation()
    whole, mask = renderer.render_supervised((*conversation.items, *turn.answer), conversation.tools)
    num_sampled = next((length for length, trained in enumerate(reversed(mask)) if not trained), len(mask))
    tokens = tuple(whole.token_ids(renderer.image_token_id)[-num_sampled:])
    if ends := set(tokens[:-1]) & set(renderer.stop_token_ids):
        raise UnknownAction(f"expected answers that the model can end, got {renderer.decode(tuple(ends))!r} in one")
    response_id = f"{name}-{index}"
    has_after = turn.agent.after is not None and call.after is not None
    return Turn(
        index=index,
        model=ModelTurn(
            response_id=response_id,
            prompt=renderer.render(conversation.items, conversation.tools),
            sampled_tokens=tokens,
            sampling_logprobs=(0.0,) * len(tokens),
            policy_version=0,
            stop="stop",
            text=renderer.decode(tokens[:-1]),
            failure=None,
            prompt_matches_renderer=True,
            request=turn.images.without_images(turn.request),
            started_at=started_at,
            duration_s=0.0,
        ),
        agent=replace(
            turn.agent,
            response_id=response_id,
            after=turn.agent.after if has_after else None,
            durations_s={},
            target_box=call.target_box,
        ),
    )
