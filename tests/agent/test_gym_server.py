"""The gym server's client, its tasks and its executions, against a double."""

import asyncio
import socket
from typing import Any

import pytest

from cua_rl.environments.gbox.boxes import open_held_boxes
from cua_rl.environments.gym.environment import GYM_ABILITIES
from cua_rl.environments.gym.fields import parse_evaluation, parse_execution
from cua_rl.environments.gym.server import fetch_gym_tasks, parse_gym_task, split_gym_tasks
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Click
from cua_rl.types.errors import ConfigError, DeviceError, DeviceServiceError, TaskError
from tests.agent.gym_bench import DEMO_IDS, open_gym, quick_executions
from tests.doubles.gbox_service import serve_gbox
from tests.patience import IdleClock


def gym_task(**fields: object) -> Any:
    return parse_gym_task(fields, base_url="http://gym", gym_id="g")


async def load(url: str, **source: object) -> list[Task]:
    config = {"source_type": "gym", "gym_base_url": url, "gym_id": "phones", **source}
    loaded = await asyncio.to_thread(load_tasks, config, seed=0, split="train", device=GYM_ABILITIES)
    return [template.make_task(0) for template in loaded.templates]


async def test_summaries_are_completed_and_names_numbers_and_tags_select() -> None:
    async with open_gym() as (_, url):
        everything = await load(url)
        by_number = await load(url, task_names=["2"])
        by_prefix = await load(url, task_names=["003_train"])
        by_tag = await load(url, tags=["hard", "EASY"])
        held_out = await load(url, eval_number_range="3-002", split_type="eval")
        with pytest.raises(ConfigError, match="expected the tasks of a gym server"):
            await load(url, gym_id="nowhere")

    assert [task.task_id for task in everything] == [f"gym/phones/{n:03d}_{name}" for n, name in enumerate(DEMO_IDS, 1)]
    assert all(task.instruction and not task.instruction.startswith("Test:") for task in everything)
    assert {task.difficulty for task in everything} == {"easy"}
    assert [task.task_id[-len(DEMO_IDS[1]) :] for task in by_number] == [DEMO_IDS[1]]
    assert len(by_prefix) == 1
    assert len(by_tag) == 3
    assert [task.task_id for task in held_out] == [task.task_id for task in everything[1:]]


def test_every_alternative_of_a_field_is_read() -> None:
    plain = gym_task(task_id="019_check_c919", name="Check", description="look", tags="hard, app")
    nested = gym_task(
        id="3f2504e0-4f89-11d3-9a0c-0305e82c3301",
        meta={"number": "011", "displayName": "Book", "description": "book it"},
        instruction="Book a flight",
    )
    nameless = gym_task(meta={"id": "task-7"}, description="seven")

    assert (plain.number, plain.instruction, plain.difficulty) == (19, "look", "hard")
    assert plain.tags == ("gym", "hard", "app")
    assert (nested.number, nested.name, nested.instruction) == (11, "Book", "Book a flight")
    assert (nameless.number, nameless.name) == (7, "task-7")
    assert gym_task(id="3f2504e0-4f89-11d3-9a0c-0305e82c3301", description="d").number is None
    with pytest.raises(ConfigError, match="with an id and an instruction"):
        gym_task(task_id="1")


def test_the_split_depends_on_seed_and_ids_only_and_a_range_of_numbers_overrides_it() -> None:
    tasks = [gym_task(task_id=f"{number:03d}_x", description="d") for number in range(10)]
    unnumbered = gym_task(task_id="no_number", description="d")

    train, held_out = split_gym_tasks(tasks, seed=1, train_ratio=0.75, eval_number_range=None)
    again = split_gym_tasks(tasks[::-1], seed=1, train_ratio=0.75, eval_number_range=None)
    other, _ = split_gym_tasks(tasks, seed=2, train_ratio=0.75, eval_number_range=None)
    _, ranged = split_gym_tasks([*tasks, unnumbered], seed=1, train_ratio=0.5, eval_number_range="004-002")

    assert len(train) + len(held_out) == 10
    assert again == (train, held_out)
    assert other != train
    assert [task.number for task in ranged] == [2, 3, 4]


def test_a_task_that_is_added_to_a_gym_moves_no_other_to_the_other_side_of_the_split() -> None:
    tasks = [gym_task(task_id=f"{number:03d}_x", description="d") for number in range(200)]

    before, after = (
        split_gym_tasks(some, seed=0, train_ratio=0.8, eval_number_range=None)[0] for some in (tasks[1:], tasks)
    )

    assert set(after) - {tasks[0]} == set(before)
    assert 0.7 < len(before) / 199 < 0.9


def test_a_gym_that_nobody_can_connect_to_is_given_up_in_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:  # they fill the queue of a server that accepts nobody: the next is left without an answer
            one.setblocking(False)
            one.connect_ex(address)
        clock = IdleClock()
        with pytest.raises(ConfigError, match="ConnectTimeout"):
            fetch_gym_tasks(f"http://127.0.0.1:{address[1]}", "demo", connect_timeout_s=0.2)
        took_s = clock.look()
        for one in waiting:
            one.close()

    assert took_s < 2


def test_a_small_gym_has_tasks_on_both_sides_and_at_most_the_one_that_was_moved_for_it_moves_later() -> None:
    for seed in range(200):
        last = None
        for number in range(2, 8):
            tasks = [gym_task(task_id=f"{one}_x", description="d") for one in range(number)]
            train, held_out = split_gym_tasks(tasks, seed=seed, train_ratio=0.8, eval_number_range=None)
            assert train
            assert held_out
            if last is not None:
                moved = (set(last[0]) - set(train)) | (set(last[1]) - set(held_out))
                assert len(moved) <= 1
                assert not moved or 1 in (len(last[0]), len(last[1]))
            last = train, held_out
    one = [gym_task(task_id="1_x", description="d")]
    assert sum(map(len, split_gym_tasks(one, seed=0, train_ratio=0.8, eval_number_range=None))) == 1


def test_scores_are_read_in_their_order_and_nothing_said_is_no_score() -> None:
    def score(**answer: Any) -> float | None:
        found = parse_evaluation(answer)
        return found.score if found else None

    validators = [{"score": 1.0, "weight": 1}, {"score": 0.5, "weight": 1}, {"pass": True}]
    assert score(success=True, result={"score": 0.4, "validators": validators}) == 0.4
    assert score(result={"score": 0, "validators": validators}) == 0.75  # 1.5 / 2; no weight counts 0
    assert score(reward=0.3, score=0.2) == 0.3
    assert score(score=0.2) == 0.2
    assert score(success=True, result={"score": 0}) == 1.0
    assert score(success=False) == 0.0
    assert score(result={}) is None
    assert score(result={"score": float("nan")}) is None
    assert score(result={"score": 1e160}, score=0.2) == 0.2  # the square of an advantage would overflow
    assert score(success=False, error="the evaluator crashed") is None


def test_the_device_is_found_wherever_a_server_names_it() -> None:
    answers: list[dict[str, Any]] = [
        {"boxId": "d"},
        {"device": {"device_serial": "d", "id": "x"}},
        {"environment": {"id": "d"}},
        {"box": {"id": "d"}},
    ]
    found = [parse_execution({"execution_id": "e", **answer}) for answer in answers]
    assert [execution and execution.device_id for execution in found] == ["d"] * 4
    assert parse_execution({"detail": "no"}) is None


async def test_creations_queue_up_and_are_repeated_until_each_has_its_answer() -> None:
    async with open_gym() as (gym, url), quick_executions() as executions:
        gym.answers_one_creation = True
        gym.create_delay_s = 0.02
        gym.create_failures.extend([408, 503])
        (task, *_) = await load(url)

        devices = await asyncio.gather(*(executions.make(task.device_request()) for _ in range(4)))

        for device in devices:
            await device.close()
            await device.close()
        assert gym.most_creating == 1
        assert len({device.device_id for device in devices}) == 4
        assert [execution.num_terminations for execution in gym.executions.values()] == [1] * 4


async def test_a_creation_that_is_never_answered_is_given_up_and_tried_again() -> None:
    async with open_gym() as (gym, url), quick_executions(0.3, parallel_creates=3) as executions:
        gym.answers_one_creation = True
        gym.create_delay_s = 0.05
        (task, *_) = await load(url)

        making = [asyncio.create_task(executions.make(task.device_request())) for _ in range(3)]
        made = await asyncio.gather(*making, return_exceptions=True)

        assert sum(not isinstance(device, BaseException) for device in made) >= 1
        assert all(isinstance(device, DeviceError) for device in made if isinstance(device, BaseException))
        gym.stop()


async def test_a_refused_task_is_a_fault_at_once() -> None:
    async with open_gym() as (gym, url), quick_executions() as executions:
        gym.create_failures.append(422)
        (task, *_) = await load(url)
        with pytest.raises(DeviceError, match="with 422: no device"):
            await executions.make(task.device_request())


async def test_a_cancelled_creation_is_ended_as_soon_as_the_server_answers() -> None:
    async with open_gym() as (gym, url):
        async with quick_executions() as executions:
            gym.create_delay_s = 0.1
            (task, *_) = await load(url)
            making = asyncio.create_task(executions.make(task.device_request()))
            while not gym.num_creating:
                await asyncio.sleep(0.01)
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
        assert (len(gym.executions), gym.num_open) == (1, 0)


async def test_an_evaluation_that_fails_is_invalid_and_never_nought() -> None:
    async with open_gym() as (gym, url), quick_executions() as executions:
        (task, *_) = await load(url)
        device = await executions.make(task.device_request())
        gym.evaluate_failures.append(500)
        assert (await task.validate(device, None)).success is False  # the second try
        gym.evaluate_failures.extend([500, 500])
        with pytest.raises(TaskError, match="evaluator crashed"):
            await task.validate(device, None)
        gym.evaluate_failures.extend([503, 503])  # overloaded: nothing is said about what the policy left
        with pytest.raises(DeviceServiceError, match="503"):
            await task.validate(device, None)
        gym.evaluation = {"detail": "no such execution"}
        with pytest.raises(TaskError, match="expected an evaluation"):
            await task.validate(device, None)
        with pytest.raises(DeviceError, match="agent=mini_agent"):
            await device.observe()
        await device.close()


async def test_the_box_behind_an_execution_is_operated_from_here_and_ended_by_the_server() -> None:
    async with open_gym() as (gym, url), serve_gbox() as gbox:
        box = gbox.double.add_box("android", {})
        gym.device_ids.append(box.box_id)
        (task, *_) = await load(url)
        async with quick_executions(open_attach=lambda: open_held_boxes(gbox.connect(), "android")) as executions:
            device = await executions.make(task.device_request())
            before = await device.observe()
            await device.execute(Click(x=before.width_px // 2, y=before.height_px // 2))
            await device.observe()
            await device.close()
            with pytest.raises(DeviceError):  # the next execution names a box that is not there
                await executions.make(task.device_request())

        assert device.device_id == box.box_id
        assert box.box_id in gbox.double.alive
        assert gym.num_open == 0
