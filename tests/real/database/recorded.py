"""A small run as events: every kind of value that the database must keep."""

import random
from collections.abc import Sequence
from hashlib import sha256
from io import BytesIO
from typing import Literal

from PIL import Image

from cua_rl.environments.device import Device
from cua_rl.events import (
    Event,
    GroupEnded,
    Phase,
    RolloutSource,
    RolloutStarted,
    SourceStarted,
    StepTrained,
    TrainingStarted,
    TurnTaken,
)
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Action, Button, Click, Drag, PressButton, PressKey, TypeText, Wait
from cua_rl.types.conversation import EncodedImage, ParseFailure
from cua_rl.types.judgement import Judgement, JudgeVote, Validation
from cua_rl.types.rollout import (
    AgentTurn,
    Chunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelTurn,
    Reward,
    Rollout,
    RolloutGroup,
    StopReason,
    Turn,
)

IMAGE_TOKEN = 151655
ACTIONS: tuple[Action | None, ...] = (
    Click(x=3, y=4),
    PressKey(keys=("ctrl", "s")),
    PressButton(button=Button.BACK),
    TypeText(text="nul \x00, lone surrogate \ud83d, escape \x1a0; and é 漢 😀"),
    Drag(x=1, y=2, to_x=3, to_y=4, duration_s=0.1 + 0.2),
    Wait(duration_s=1e-300),
    None,
)


async def read_nothing(device: Device, answer: str | None) -> Validation:
    raise NotImplementedError("these rollouts are made up")


def make_task(seed: int = 7) -> Task:
    return Task(
        task_id="open_settings",
        seed=seed,
        instruction="Open the settings.",
        category="system",
        difficulty="easy",
        max_turns=9,
        validate=read_nothing,
        tags=("demo",),
    )


def draw(kind: Literal["png", "jpeg"], width_px: int, height_px: int, colour: bytes) -> EncodedImage:
    """An area of one colour."""
    data = BytesIO()
    Image.new("RGB", (width_px, height_px), tuple(colour[:3])).save(data, kind)
    return EncodedImage(data=data.getvalue(), format=kind, width_px=width_px, height_px=height_px)


def make_observation(rng: random.Random) -> EncodedImage:
    colour = rng.randbytes(2000)
    return draw("png", rng.randrange(1, 400), 320, colour)


def make_turn(rng: random.Random, index: int, seen: Sequence[EncodedImage]) -> Turn:
    """A turn whose prompt holds every earlier screenshot, with adjacent images and split text now and then."""
    chunks: list[Chunk] = [EncodedTextChunk(tokens=(1, 2, IMAGE_TOKEN)), EncodedTextChunk(tokens=(3,))]
    for number, shot in enumerate(seen):
        chunks.append(ImageChunk(image=shot, expected_tokens=60))
        if number % 2:
            chunks.append(EncodedTextChunk(tokens=tuple(rng.randrange(1000) for _ in range(5))))
    chunks.append(ImageChunk(image=draw("jpeg", 64, 32, rng.randrange(10**9).to_bytes(4, "little")), expected_tokens=4))
    sampled = tuple(rng.randrange(150_000) for _ in range(rng.randrange(1, 30)))
    failure = ParseFailure(kind="json", message="no JSON: \x00") if index % 3 == 2 else None
    action = ACTIONS[rng.randrange(len(ACTIONS))]
    model = ModelTurn(
        response_id=f"resp_{rng.getrandbits(64):x}",
        prompt=ModelInput(chunks=tuple(chunks)),
        sampled_tokens=sampled,
        sampling_logprobs=tuple(-rng.expovariate(1.0) for _ in sampled),
        policy_version=rng.randrange(3),
        stop="length" if index % 2 else "stop",
        text="<think>\x00 \ud800</think> answer",
        failure=failure,
        prompt_matches_renderer=bool(index % 2),
        request={"input": [{"text": "a\x00b", "image": seen[-1].sha256}], "temperature": 1.0, "top_p": None},
        started_at=1.7e9 + rng.random(),
        duration_s=rng.random(),
        cached_tokens=rng.randrange(100),
        grammar='{"type": "structural_tag", "begin": "\\u0000"}' if index % 2 else "",
    )
    done = AgentTurn(
        response_id=model.response_id,
        before=None if index == 3 else seen[-1],  # a turn of text alone
        action=action,
        action_error=None if action else "could not be parsed",
        after=make_observation(rng) if action else None,
        durations_s={"respond": rng.random(), "execute": 0.1 + 0.2},
        target_box=(10, 20, 30, 40) if index == 1 else (),
    )
    return Turn(index=index, model=model, agent=done, state="" if index % 2 else f"state {index}\x00")


def make_judgement(*, is_reached: bool) -> Judgement:
    """Two votes of three beside a validator, or none that could decide."""
    said = JudgeVote(
        success=is_reached or None,
        reason="nul \x00, \ud83d",
        score=0.5 if is_reached else None,
        text='{"success": true}',
        duration_s=0.1 + 0.2,
        num_prompt_tokens=1000,
        num_answer_tokens=40,
    )
    lost = JudgeVote(success=None, error="503", duration_s=1.5)
    prompt = "Decide.\x00"
    return Judgement(
        model="judge-1",
        prompt=prompt,
        prompt_sha256=sha256(prompt.encode()).hexdigest(),
        screenshots="final",
        votes=(said, said, lost),
        decides=not is_reached,
        duration_s=1.5,
        cost_usd=0.1 + 0.2 if is_reached else None,
    )


def make_rollout(rng: random.Random, member_index: int, *, fault: StopReason | None = None) -> Rollout:
    seen = [make_observation(rng)]
    turns: list[Turn] = []
    for index in range(rng.randrange(1, 5)):
        turns.append(make_turn(rng, index, seen))
        seen.append(turns[-1].agent.after or make_observation(rng))
    success = rng.random() < 0.5
    checked = Validation(query="settings", expected="open", actual="\x00", success=success, duration_s=rng.random())
    return Rollout(
        rollout_id=f"{rng.getrandbits(64):x}",
        task_id="open_settings",
        seed=7,
        group_index=0,
        member_index=member_index,
        device_id=None if fault else f"phone-{member_index}",
        turns=tuple(turns),
        stop_reason=fault or StopReason.FINISHED,
        answer=None if fault else "done \ud83d",
        validation=None if fault else checked,
        reward=None
        if fault
        else Reward(
            total=rng.random() / 3,
            parts={"success": float(success), "turns": -0.1},
            of_turns=tuple(0.1 * turn.index for turn in turns) if member_index else (),
        ),
        error="the device is gone" if fault else None,
        started_at=1.7e9 + rng.random(),
        duration_s=rng.random() * 10,
        judgement=make_judgement(is_reached=not fault) if member_index else None,
        max_turns=9,
    )


def make_group(seed: int = 0, group_id: str = "group", num_rollouts: int = 3) -> RolloutGroup:
    rng = random.Random(seed)
    members = [make_rollout(rng, member) for member in range(num_rollouts)]
    lost = make_rollout(rng, 1, fault=StopReason.DEVICE_ERROR)
    return RolloutGroup(
        group_id=group_id,
        index=0,
        task_id="open_settings",
        seed=7,
        rollouts=tuple(members),
        faulty=(lost,),
        category="system",
    )


def advantages_of(group: RolloutGroup) -> tuple[float, ...]:
    mean = sum(group.rewards) / len(group.rewards)
    return tuple(reward - mean for reward in group.rewards)


def turn_advantages_of(group: RolloutGroup) -> tuple[tuple[float, ...], ...]:
    """Those of the last rollout's turns are its own advantage."""
    own = [tuple(turn.index / 3 - rollout.member_index for turn in rollout.turns) for rollout in group.compared]
    return (*own[:-1], ())


def start(first_step: int = 1) -> TrainingStarted:
    return TrainingStarted(
        run_name="run", log_path="/logs/run", config={"seed": 1, "name": "a\x00"}, first_step=first_step, total_steps=4
    )


def source_events(group: RolloutGroup, step: int = 1, phase: Phase = "step") -> list[Event]:
    """A step or evaluation of one group, up to the end of the group."""
    source = RolloutSource(phase=phase, step=step)
    version = step - 1 if phase == "step" else step
    events: list[Event] = [SourceStarted(source=source, tasks=(make_task(),), group_size=3, policy_version=version)]
    for rollout in (*group.rollouts, *group.faulty):
        events.append(rollout_start(source, group, rollout))
        events += [TurnTaken(rollout_id=rollout.rollout_id, turn=turn) for turn in rollout.turns]
    if phase != "step":
        return [*events, GroupEnded(source=source, group=group, advantages=None)]
    of_turns = turn_advantages_of(group)
    ended = GroupEnded(source=source, group=group, advantages=advantages_of(group), turn_advantages=of_turns)
    return [*events, ended]


def rollout_start(source: RolloutSource, group: RolloutGroup, rollout: Rollout) -> RolloutStarted:
    return RolloutStarted(
        source=source,
        rollout_id=rollout.rollout_id,
        group_id=group.group_id,
        group_index=group.index,
        member_index=rollout.member_index,
        task=make_task(),
        device_id=f"phone-{rollout.member_index}",
        max_turns=9,
        parent_id=rollout.parent_id,
        fork_turn=rollout.fork_turn,
    )


def step_end(group: RolloutGroup, step: int = 1) -> StepTrained:
    logprobs = {
        rollout.rollout_id: tuple(
            (turn.index, tuple(value - 0.1 for value in turn.model.sampling_logprobs)) for turn in rollout.turns
        )
        for rollout in group.rollouts
    }
    return StepTrained(
        step=step,
        policy_version=step,
        datums_sha256=f"{step:064x}",
        num_datums=3,
        training_logprobs=logprobs,
        metrics={"loss/policy": 0.1 + 0.2, "odd": float("inf")},
    )
