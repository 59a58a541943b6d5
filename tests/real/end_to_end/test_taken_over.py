"""A small recorded run whose rollouts are taken over, by hand and with a checkpoint, and what is learned from them."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from sqlalchemy import select

from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.models import RolloutRow, Training
from cua_rl.environments.device import ActionRejected
from cua_rl.environments.phone.demo.expert import decide
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.sft import main as sft
from cua_rl.recipes.take_over import TakeOverConfig, cli_main
from cua_rl.reporting.asked import AskedTurn
from cua_rl.run.asking import find_models, load_recorded, open_questions
from cua_rl.run.by_hand import Lines
from cua_rl.run.prepared_sft import build_recorded_examples
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database, open_training
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer
from cua_rl.supervised.recorded import RecordedSuccesses, load_successes
from cua_rl.types.actions import Action, Click, Drag, Finish, PressButton, TypeText
from cua_rl.types.rollout import Rollout
from tests.real.end_to_end.runs import Run, survivors

pytestmark = pytest.mark.timeout(900)

NUM_DEMONSTRATIONS = 10
MAX_TURNS = 8
"""More than the tasks allow: a person may need the turns that the model has wasted."""


@pytest.fixture(scope="module")
def folder(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(tmp_path_factory.mktemp("taken") / "run", "max_steps=1", f"base_url={server.base_url}", "monitor=false")
    assert run.finish() == 0, run.output()
    return run.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recorded rollout, the number of the turn from which its task can still be done, and the words that do it."""

    rollout: Rollout
    turn: int
    words: Sequence[str]


def in_words(action: Action | Finish) -> str:
    match action:
        case Click(x=x, y=y):
            return f"click {x} {y}"
        case Drag():
            return f"swipe {action.x} {action.y} {action.to_x} {action.to_y}"
        case TypeText(text=text):
            return f'type "{text}"'
        case PressButton(button=button):
            return button.value
        case Finish(answer=str(answer)):
            return f'answer "{answer}"'
        case _:
            return "finish"


async def find_way(rollout: Rollout, turn: int) -> Case | None:
    """What an expert does from a turn on, on a phone that was brought there; None if it cannot do the task any more."""
    task = TEMPLATES[rollout.task_id].make_task(rollout.seed)
    phone, words = make_simulated_phone(task), list[str]()
    for action in (action for before in rollout.turns[: turn - 1] for action in before.agent.actions):
        try:
            await phone.execute(action)
        except ActionRejected:
            continue
    answer: str | None = None
    for _ in range(turn, MAX_TURNS + 1):
        action = decide(task, phone).action
        words.append(in_words(action))
        if isinstance(action, Finish):
            answer = action.answer
            break
        await phone.execute(action)
    is_done = task.validate is not None and (await task.validate(phone, answer)).success
    return Case(rollout=rollout, turn=turn, words=words) if is_done else None


async def find_cases(folder: Path) -> list[Case]:
    """Of every rollout that failed, the last turn from which its task can be done; then of others, the first."""
    cases: list[Case] = []
    async with open_training(folder, {}, "log_path") as run:
        mine = select(RolloutRow.rollout_id).where(RolloutRow.training_id == run.key)
        for one in await run.session.scalars(mine.order_by(RolloutRow.success, RolloutRow.id)):
            rollout = (await load_recorded(run, one)).rollout
            turns = [1] if rollout.success else range(len(rollout.turns), 0, -1)
            ways = [way for turn in turns if (way := await find_way(rollout, turn)) is not None]
            cases += ways[:1]
    return cases


async def take(folder: Path, case: Case, demonstrations: Path) -> None:
    lines = Lines()
    for word in case.words:
        lines.put_nowait(word)
    config = TakeOverConfig(
        log_path=folder,
        rollout_id=case.rollout.rollout_id,
        turn=case.turn,
        demonstrations=demonstrations,
        max_turns=MAX_TURNS,
    )
    await cli_main(config, {}, lines=lambda: lines)


async def successes(folder: Path) -> RecordedSuccesses:
    async with open_run_database(str(folder), {}, "from_run") as (database, name), database.sessions() as session:
        key = await find_training_id(database, name)
        return await load_successes(session, key, num_steps=None, max_per_task=None, seed=0)


async def ask(demonstrations: Path, learned: Path, server_url: str) -> list[AskedTurn]:
    """What base model and adapter answer where the demonstrations begin."""
    async with open_training(demonstrations, {}, "log_path") as run:
        models = find_models(run, ["base", str(learned)], TINY_QWEN3_VL)
        chosen = [await load_recorded(run, one.rollout_id) for one in (await successes(demonstrations)).rollouts]
        async with open_questions(run, chosen[0], models, ServerConfig(), server_url) as questions:
            return [await questions.ask(one, one.rollout.fork_turn, models, 4) for one in chosen]


def test_ten_demonstrations_by_hand_change_the_answers_of_a_model_that_learns_from_them(
    server: VllmServer, folder: Path, tmp_path: Path
) -> None:
    demonstrations, learned = tmp_path / "by-hand", tmp_path / "learned"
    cases = asyncio.run(find_cases(folder))[:NUM_DEMONSTRATIONS]
    assert len(cases) == NUM_DEMONSTRATIONS
    assert sum(not case.rollout.success for case in cases) >= 3

    async def take_all() -> None:
        for case in cases:
            await take(folder, case, demonstrations)

    asyncio.run(take_all())

    found = asyncio.run(successes(demonstrations))
    assert found.num_successes == NUM_DEMONSTRATIONS
    assert len(found.rollouts) == NUM_DEMONSTRATIONS - found.num_repeats >= NUM_DEMONSTRATIONS / 2  # equal ones are one
    for one in found.rollouts:
        case = next(
            case
            for case in cases
            if (case.rollout.task_id, case.turn - 1) == (one.task_id, one.fork_turn)
            and one.parent_id in (None, case.rollout.rollout_id)
        )
        assert (one.fork_turn, len(one.own_turns)) == (case.turn - 1, len(case.words))
        assert one.own_turns[0].state == case.rollout.turns[case.turn - 1].state != ""
        assert one.own_turns[0].model.prompt == case.rollout.turns[case.turn - 1].model.prompt
    examples = build_recorded_examples(found.rollouts, found.image_token_id)
    trained = sum(datum.num_trained_tokens for example in examples for datum in example)
    assert trained == sum(len(turn.model.sampled_tokens) for one in found.rollouts for turn in one.own_turns)

    options = [f"batch_size={len(found.rollouts)}", "max_steps=40", "num_eval_conversations=0", "num_threads=1"]
    assert sft([f"log_path={learned}", "data=rollouts", f"from_run={demonstrations}", *options]) == 0
    asked = asyncio.run(ask(demonstrations, learned, server.base_url))

    before, after = ([sum(one.checkpoints[place].logprobs) for one in asked] for place in range(2))
    same = [
        sum(sample.done == one.recorded.done for one in asked for sample in one.checkpoints[place].samples)
        for place in range(2)
    ]
    assert not any(each.is_own for one in asked for each in one.checkpoints)
    told = f"nats of the demonstrated answers {before} -> {after}; of {4 * len(asked)} answers {same} are those"
    assert all(new > old for old, new in zip(before, after, strict=True)), told
    assert same[1] > same[0], told


async def rows(folder: Path) -> list[tuple[Training, list[RolloutRow]]]:
    async with open_run_database(str(folder), {}, "run") as (database, _), database.sessions() as session:
        trainings = list(await session.scalars(select(Training)))
        return [
            (one, list(await session.scalars(select(RolloutRow).where(RolloutRow.training_id == one.id))))
            for one in trainings
        ]


def test_a_checkpoint_takes_over_and_can_be_taken_over_again(server: VllmServer, folder: Path, tmp_path: Path) -> None:
    case = max(asyncio.run(find_cases(folder)), key=lambda case: case.turn)
    first, second = tmp_path / "first", tmp_path / "second"
    words = [f"rollout_id={case.rollout.rollout_id[:-2]}", f"turn={case.turn}", "by=1", f"base_url={server.base_url}"]

    assert run_recipe(TakeOverConfig, cli_main, [f"log_path={folder}", *words, f"demonstrations={first}"]) == 0

    async def load(folder: Path) -> Rollout:
        async with open_training(folder, {}, "log_path") as run:
            return (await load_recorded(run, "")).rollout

    one = asyncio.run(load(first))
    assert {turn.model.policy_version for turn in one.own_turns} == {1}
    assert all(logprob <= 0 for turn in one.own_turns for logprob in turn.model.sampling_logprobs)
    assert any(logprob < 0 for turn in one.own_turns for logprob in turn.model.sampling_logprobs)
    asyncio.run(take(first, Case(rollout=one, turn=case.turn, words=case.words), second))
    again = asyncio.run(load(second))
    assert (again.fork_turn, again.success) == (case.turn - 1, True)
    assert again.parent_id == (one.rollout_id if case.turn > 1 else None)


def test_ctrl_c_ends_it_frees_everything_and_the_next_one_takes_its_place(folder: Path, tmp_path: Path) -> None:
    case, demonstrations = asyncio.run(find_cases(folder))[0], tmp_path / "by-hand"
    command = [sys.executable, "-u", "-m", "cua_rl.recipes.take_over", f"log_path={folder}"]
    command += [f"rollout_id={case.rollout.rollout_id}", f"turn={case.turn}", f"demonstrations={demonstrations}"]
    environ = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = next(line for line in process.stdout if re.match(r"turn \d+: ", line))
        assert said.startswith(f"turn {case.turn}: 192x320 pixels in {demonstrations / 'screen.png'}")
        started = psutil.Process(process.pid).children(recursive=True)
        assert started, "databases run"
        process.send_signal(signal.SIGINT)
        # its input is still open, as a terminal's would be
        assert process.wait() == 130
    assert survivors(started) == []
    ((training, (row,)),) = asyncio.run(rows(demonstrations))
    assert (training.status, row.status, row.reward) == ("cancelled", "cancelled", None)

    asyncio.run(take(folder, case, demonstrations))
    ((training, (row,)),) = asyncio.run(rows(demonstrations))
    assert (training.status, training.num_completed_steps, row.success) == ("completed", 1, True)
