"""Groups in which rollouts go on from turns of others, with the real agent, gateway and simulated phones."""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from random import Random
from typing import Any

import pytest

from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.database.writer import TimedEvent
from cua_rl.environments.device import ActionRejected, Device, DeviceAround
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator.device import Operation, SimulatedPhone
from cua_rl.environments.pool import DeviceBackend, DeviceRequest, open_pool
from cua_rl.events import RolloutSource, RolloutStarted, TurnTaken
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.advantages import score_group
from cua_rl.rl.datums import build_batch
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.rollout.branches import BranchingSettings, Fork, RetoldDevice
from cua_rl.rollout.group import GroupJob, Runner, run_group
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.sampler import Sampled, TurnRequest
from cua_rl.tasks.readiness import validate
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Action, Click, Wait
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError, UnusableError
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import AdapterRef, Rollout, RolloutGroup, SamplingParams, StopReason, Turn
from cua_rl.workers.worker import RolloutWorker, Workplace, event_in_run_time
from tests.builders import model_turn as some_answer
from tests.builders import prompt, text, turn
from tests.fakes import FakeDevice, FakeRecorder, make_task
from tests.workers.test_workers import FakeAdapters

RENDERER = make_renderer(TINY_QWEN3_VL)
PARAMS = SamplingParams(max_tokens=48, temperature=1.0, seed=5)
MAX_TURNS = 6


ON_PHONES: Sequence[dict[str, Any]] = (
    *[{"action": "click"}] * 4,
    {"action": "swipe", "coordinate2": [500, 500]},
    {"action": "type", "text": "tea"},  # refused without a focus
    {"action": "system_button", "button": "Back"},
)
ON_COMPUTERS: Sequence[dict[str, Any]] = (
    *[{"action": "left_click"}] * 3,
    {"action": "double_click"},
    {"action": "left_click_drag"},
    {"action": "scroll", "pixels": -200},
    {"action": "type", "text": "tea"},
    {"action": "key", "keys": ["tab"]},
)


@dataclass
class RandomModel:
    """Acts at random, by the seed of the request: sometimes what the device refuses, sometimes nothing that parses."""

    tool: str = "mobile_use"
    acts: Sequence[dict[str, Any]] = ON_PHONES
    num_answers: int = 0
    current: AdapterRef | None = None
    max_model_len: int = 100_000

    def pin(self, adapter: AdapterRef) -> None: ...

    def unpin(self, adapter: AdapterRef) -> None: ...

    def forget(self, sticky_key: str) -> None: ...

    async def sample_turn(
        self, turn: TurnRequest, *, adapter: AdapterRef | None = None, sticky_key: str = ""
    ) -> tuple[Sampled, AdapterRef | None]:
        self.num_answers += 1
        random = Random(turn.params.seed)
        place = [random.randrange(1000), random.randrange(1000)]
        asked = random.choice(self.acts)
        if not asked.keys() & {"text", "keys", "button"}:
            asked = {**asked, "coordinate": place}
        call = f"<tool_call>\n{json.dumps({'name': self.tool, 'arguments': asked})}\n</tool_call>"
        answer = random.choice([call] * 7 + ["I do not know."])
        tokens = (*RENDERER.encode(answer), RENDERER.stop_token_ids[0])
        logprobs = tuple(-random.random() for _ in tokens)
        prompt_ids = tuple(turn.prompt.token_ids(RENDERER.image_token_id))
        sampled = Sampled(prompt_ids=prompt_ids, tokens=tokens, logprobs=logprobs, is_complete=True, cached_tokens=0)
        return sampled, None


@dataclass
class Sampling:
    """What came of running a group."""

    group: RolloutGroup
    model: RandomModel
    recorder: FakeRecorder = field(default_factory=FakeRecorder)


async def run(
    task: Task,
    settings: BranchingSettings,
    *,
    group_size: int = 8,
    watch_goal: bool = False,
    backend: DeviceBackend | None = None,
    model: RandomModel | None = None,
    num_faulty: int | None = 0,
    moving_top: float = 0.0,
    num_kept: int = 0,
    via: Callable[[RolloutRunner, FakeRecorder], Runner] = lambda runner, _: runner,
) -> Sampling:
    model, recorder = model or RandomModel(), FakeRecorder()
    async with open_pool(backend or SimulatedPhones(), max_devices=4) as pool:
        gateway = Gateway(model, RENDERER, PARAMS)
        runner = RolloutRunner(
            devices=pool,
            gateway=gateway,
            agent=GBoxAgent(),
            reward=binary_reward,
            recorder=recorder,
            max_turns=MAX_TURNS,
            watch_goal=watch_goal,
        )
        source = RolloutSource(phase="step", step=1)
        job = GroupJob(source=source, group_size=group_size, params=PARAMS, branching=settings, moving_top=moving_top)
        group = await run_group(via(runner, recorder), task, 0, job)
        assert (pool.num_alive, pool.num_leased, gateway.prompt_mismatches) == (num_kept, 0, 0)
    assert num_faulty in (None, len(group.faulty)), [one.error for one in group.faulty]
    return Sampling(group, model, recorder)


def count_siblings(group: RolloutGroup) -> int:
    """Siblings without a fault; each has come to the fork as its parent did, and has the same prompt there."""
    members = {one.rollout_id: one for one in group.rollouts}
    siblings = [one for one in members.values() if one.parent_id is not None]
    for one in siblings:
        parent, place = members[str(one.parent_id)], one.fork_turn
        assert one.turns[:place] == parent.turns[:place]
        assert one.own_turns[0].agent.before == parent.turns[place].agent.before
        assert one.own_turns[0].model.prompt == parent.turns[place].model.prompt
    return len(siblings)


@dataclass
class WorkerWithWrongClock:
    """Runs siblings in a worker whose clock is an hour ahead of the run's; others run in the run's own process."""

    runner: RolloutRunner
    recorder: FakeRecorder
    ahead_s: float = 3600.0

    async def run(self, job: RolloutJob) -> Rollout:
        if not job.fork.turns:
            return await self.runner.run(job)

        @asynccontextmanager
        async def open_place() -> AsyncGenerator[Workplace]:
            yield Workplace(
                runner=self.runner, recorder=self.recorder, policies=FakeAdapters(), clock_ahead_s=self.ahead_s
            )

        worker = RolloutWorker("b", 1, open_place)
        await worker.open()
        ended = await worker.run(job, None)
        await worker.close()
        return ended

    def in_run_time(self, event: TurnTaken) -> Turn:
        timed = event_in_run_time(TimedEvent(event=event, at=datetime.now(UTC)), self.ahead_s)
        assert isinstance(timed.event, TurnTaken)
        return timed.event.turn


async def is_unsolved(device: Device, answer: str | None) -> Validation:
    return Validation(query="wifi_enabled", expected="true", actual="false", success=False)


UNSOLVED = replace(make_task(max_turns=MAX_TURNS), validate=is_unsolved)
"""A task for any device."""


def long_task(number: int = 0) -> Task:
    found = [TEMPLATES[name] for name in sorted(TEMPLATES) if TEMPLATES[name].max_turns >= MAX_TURNS]
    return found[number].make_task(3)


async def repeat(task: Task, rollout: Rollout) -> None:
    """Do on a fresh phone what a rollout did from its first turn: the same must be seen."""
    phone = await SimulatedPhones().make(task.device_request())
    for one in rollout.turns:
        shown = await phone.observe()
        assert (shown, shown.state) == (one.agent.before, one.state)
        for action in one.agent.actions:
            is_refused = one.agent.action_error is not None and action == one.agent.actions[-1]
            with pytest.raises(ActionRejected) if is_refused else nullcontext():
                await phone.execute(action)
        if one.agent.after is not None:
            assert await phone.observe() == one.agent.after
    again = await validate(task, phone, rollout.answer)
    assert rollout.validation is not None
    assert replace(again, duration_s=0.0) == replace(rollout.validation, duration_s=0.0)


@dataclass(frozen=True, slots=True)
class UncopiedPhone(DeviceAround):
    """A phone that has no copies."""

    async def observe(self) -> EncodedImage:
        return await self.device.observe()

    async def execute(self, action: Action) -> None:
        await self.device.execute(action)


class UncopiedPhones(SimulatedPhones):
    """Phones on which siblings do their parents' turns again."""

    async def make(self, request: DeviceRequest) -> Device:
        return UncopiedPhone(await super().make(request))


class OtherPhones(UncopiedPhones):
    """Those of siblings, after the first four, begin otherwise."""

    places = count(1)

    async def make(self, request: DeviceRequest) -> Device:
        return await super().make(request if next(self.places) <= 4 else replace(request, seed=request.seed + 1))


@pytest.mark.parametrize("backend", [SimulatedPhones, UncopiedPhones])
@pytest.mark.parametrize("rule", ["random_turn", "highest_entropy", "first_disagreement", "before_failure"])
async def test_siblings_go_on_exactly_from_a_turn_of_their_parent(rule: Any, backend: type[SimulatedPhones]) -> None:
    for number in range(3):
        task = long_task(number)
        sampling = await run(task, BranchingSettings(num_siblings=2, at=rule), backend=backend())
        members = {one.rollout_id: one for one in sampling.group.rollouts}
        siblings = [one for one in members.values() if one.parent_id]

        # 8 are two whole ones, two parents and two siblings of each
        assert [one.member_index for one in siblings] == [4, 5, 6, 7]
        assert {members[str(one.parent_id)].member_index for one in siblings} == {2, 3}
        for one in siblings:
            parent = members[str(one.parent_id)]
            assert one.turns[: one.fork_turn] == parent.turns[: one.fork_turn]
            assert one.own_turns[0].agent.before == parent.turns[one.fork_turn].agent.before
            assert one.own_turns[0].model.prompt == parent.turns[one.fork_turn].model.prompt
            assert one.own_turns[0].model.response_id != parent.turns[one.fork_turn].model.response_id
        answers = {one.own_turns[0].model.sampled_tokens for one in siblings}
        assert len(answers) > 1
        for one in members.values():
            assert [turn.index for turn in one.turns] == list(range(len(one.turns)))
            assert one.moments == ()
            await repeat(task, one)
        # what siblings share with their parents was not sampled again
        assert sampling.model.num_answers == sum(len(one.own_turns) for one in members.values())
        num_shared = rollout_metrics([sampling.group])["rollout/shared_turns"]
        assert num_shared == sum(len(one.turns) for one in members.values()) - sampling.model.num_answers > 0


async def test_a_tree_is_recorded_and_trained_as_it_was_sampled() -> None:
    sampling = await run(long_task(), BranchingSettings(num_siblings=3))
    rollouts = sampling.group.rollouts
    events = sampling.recorder.events

    started = {one.rollout_id: one for one in events if isinstance(one, RolloutStarted)}
    assert {(one.parent_id, one.fork_turn) for one in rollouts if one.parent_id} == {
        (one.parent_id, one.fork_turn) for one in started.values() if one.parent_id
    }
    for one in rollouts:
        taken = [event.turn for event in events if isinstance(event, TurnTaken) and event.rollout_id == one.rollout_id]
        assert tuple(taken) == one.turns
    rewarded = tuple(
        replace(one, reward=replace(one.reward, total=float(index % 2)))
        for index, one in enumerate(rollouts)
        if one.reward is not None
    )
    scored = score_group(replace(sampling.group, rollouts=rewarded), "leave_one_out")
    batch = build_batch([scored], RENDERER.image_token_id)
    trained = sum(datum.num_trained_tokens for datum in batch.datums)
    assert trained == sum(len(turn.model.sampled_tokens) for one in rollouts for turn in one.own_turns)
    assert batch.metrics["rollout/retokenised_tokens"] == 0
    assert batch.num_rollouts == 5  # four whole ones and a tree


async def test_turns_of_a_parent_keep_their_times_in_a_worker_with_a_wrong_clock() -> None:
    workers: list[WorkerWithWrongClock] = []

    def via(runner: RolloutRunner, recorder: FakeRecorder) -> WorkerWithWrongClock:
        workers.append(WorkerWithWrongClock(runner, recorder))
        return workers[-1]

    sampling = await run(long_task(), BranchingSettings(num_siblings=2), via=via)

    members = {one.rollout_id: one for one in sampling.group.rollouts}
    taken = [one for one in sampling.recorder.events if isinstance(one, TurnTaken)]
    siblings = [one for one in members.values() if one.parent_id]
    assert len(siblings) == 4
    for one in siblings:
        parent = members[str(one.parent_id)]
        recorded = [workers[0].in_run_time(event) for event in taken if event.rollout_id == one.rollout_id]
        assert recorded == list(one.turns)
        assert recorded[: one.fork_turn] == list(parent.turns[: one.fork_turn])
        # the others were taken just now, an hour ago by the run's clock
        assert all(turn.model.started_at < parent.started_at - 3000.0 for turn in one.own_turns)


async def test_a_device_that_does_not_show_the_same_again_is_a_fault_and_no_wrong_beginning() -> None:
    # four siblings are tried three times each
    sampling = await run(long_task(), BranchingSettings(num_siblings=2), backend=OtherPhones(), num_faulty=12)

    assert [one.parent_id for one in sampling.group.rollouts] == [None] * 4
    for one in sampling.group.faulty:
        assert one.stop_reason is StopReason.DEVICE_ERROR
        assert "expected the screenshot that was recorded before it" in str(one.error)


class FragilePhones(SimulatedPhones):
    """Phones that the second action of any rollout leaves with nothing to see, while its policy acts."""

    async def make(self, request: DeviceRequest) -> Device:
        phone = await super().make(request)
        assert isinstance(phone, SimulatedPhone)
        done: list[Operation] = []

        def work(operation: Operation) -> None:
            done.append(operation)
            if done.count("execute") > 1 and operation != "query":
                raise UnusableError("closed")

        return SimulatedPhone(phone.state, on_operation=work)


async def test_what_a_parent_does_to_its_device_is_a_result_as_for_whole_rollouts() -> None:
    sampling = await run(long_task(), BranchingSettings(num_siblings=2), backend=FragilePhones())

    assert {one.stop_reason for one in sampling.group.rollouts} == {StopReason.MAX_TIME}
    whole = [one for one in sampling.group.rollouts if not one.parent_id]
    assert len(whole) == 4


async def test_without_branches_groups_are_as_before() -> None:
    sampling = await run(long_task(), BranchingSettings(), group_size=3)

    assert [(one.member_index, one.parent_id, one.fork_turn) for one in sampling.group.rollouts] == [
        (index, None, 0) for index in range(3)
    ]
    assert "rollout/shared_turns" not in rollout_metrics([sampling.group])


async def test_an_agent_that_does_not_repeat_itself_is_a_fault() -> None:
    told = [turn(0, some_answer(prompt(text(1))))]
    told = [replace(one, agent=replace(one.agent, action=Click(x=1, y=2))) for one in told]
    retold = RetoldDevice(FakeDevice(), fork=Fork(turns=tuple(told)), taken=[])

    await retold.execute(Click(x=1, y=2))
    with pytest.raises(DeviceError, match="actions of the parent's agent"):
        await retold.execute(Wait(duration_s=1.0))
    with pytest.raises(DeviceError, match="where the parent's agent took one"):
        await retold.observe()  # its parent's device was not looked at after this action
