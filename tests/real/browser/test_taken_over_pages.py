"""MiniWoB++ pages that a person takes over: by seed and actions, each screenshot held against the recorded one."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from sqlalchemy import text

pytest.importorskip("miniwob", reason="`make setup` installs the pages")

from cua_rl.agent.tools import COMPUTER_USE
from cua_rl.command_line.plain_config import plain_config
from cua_rl.database.postgres import open_own_database
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import open_sessions
from cua_rl.environments.browser.environment import MiniWobPages
from cua_rl.environments.browser.miniwob.expert import MiniWobExperts
from cua_rl.environments.browser.miniwob.templates import miniwob_template
from cua_rl.events import GroupEnded, RolloutSource, SourceStarted, StepTrained, TrainingStarted
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.take_over import TakeOverConfig, cli_main
from cua_rl.renderers.renderer import make_renderer
from cua_rl.rewards.reward import binary_reward
from cua_rl.rollout.run import RolloutJob
from cua_rl.run.by_hand import Lines, Person
from cua_rl.run.devices import open_devices, prepare_devices
from cua_rl.run.prepared_sft import build_recorded_examples
from cua_rl.run.recording import recorded
from cua_rl.run.rollouts import open_runners
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database
from cua_rl.supervised.recorded import load_successes
from cua_rl.tasks.readiness import prepare
from cua_rl.types.actions import Action, Click, Finish, TypeText
from cua_rl.types.errors import DeviceError
from cua_rl.types.rollout import Rollout, RolloutGroup, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

RENDERER = make_renderer(TINY_QWEN3_VL)
SEED, MAX_TURNS = 3, 8
TASK = miniwob_template("enter-text").make_task(SEED)
CONFIG = CLIConfig(
    model_name=str(TINY_QWEN3_VL),
    tasks={"source_type": "miniwob", "task_names": ["enter-text"]},
    max_concurrent_rollouts=1,
    max_tokens=64,
    max_turns=MAX_TURNS,
)


def say(words: Sequence[str]) -> Lines:
    lines = Lines()
    for line in words:
        lines.put_nowait(line)
    return lines


def in_words(action: Action | Finish) -> str:
    match action:
        case Click(x=x, y=y):
            return f"click {x} {y}"
        case TypeText(text=typed):
            return f'type "{typed}"'
        case _:
            return "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    folder: Path
    rollout: Rollout
    way: Sequence[str]
    """What solves the task from its beginning, in words."""


async def find_way() -> list[str]:
    """What an expert does on another page of the seed."""
    async with MiniWobPages(scale=3.0) as pages:
        page = await pages.make(TASK.device_request())
        await prepare(TASK, page)
        expert = MiniWobExperts().make(TASK, page, error_rate=0.0, random=Random(0))
        words: list[str] = []
        while not words or words[-1] != "finish":
            decision = await expert()
            words.append(in_words(decision.action))
            if not isinstance(decision.action, Finish):
                await page.execute(decision.action)
        await page.close()
    return words


async def record(folder: Path, words: Sequence[str]) -> Rollout:
    """A training run of one step with one rollout, in which the model says these words."""
    paths = {"run_name": folder.name, "log_path": str(folder), "model_path": str(TINY_QWEN3_VL)}
    settings = plain_config(CONFIG) | paths | {"renderer": RENDERER.name}
    source = RolloutSource(phase="step", step=1)
    model = Person(
        renderer=RENDERER,
        tool=COMPUTER_USE,
        reach=lambda _: (1000, 1000),
        cursor=None,
        turn=0,
        screen_path=folder / "screen.png",
        lines=say(words),
        echo=lambda _: None,
        max_model_len=8192,
    )
    folder.mkdir()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(open_own_database(folder))
        recorder = await stack.enter_async_context(DatabaseRecorder(url, image_token_id=RENDERER.image_token_id))
        started = TrainingStarted(
            run_name=folder.name, log_path=str(folder), config=settings, first_step=1, total_steps=1
        )
        await stack.enter_async_context(recorded(recorder, started))
        await recorder.record(SourceStarted(source=source, tasks=(TASK,), group_size=1, policy_version=0))
        devices = await stack.enter_async_context(open_devices(prepare_devices(CONFIG, folder, {}), max_devices=1))
        make_runner = await stack.enter_async_context(
            open_runners(
                CONFIG, devices, model, RENDERER, None, reward=binary_reward, log_folder=folder, recorder=recorder
            )
        )
        params = SamplingParams(max_tokens=64, temperature=1.0)
        job = RolloutJob(source=source, group_id="group", group_index=0, member_index=0, task=TASK, params=params)
        rollout = await make_runner().run(job)
        group = RolloutGroup(group_id="group", index=0, task_id=TASK.task_id, seed=SEED, rollouts=(rollout,))
        await recorder.record(GroupEnded(source=source, group=group, advantages=(0.0,)))
        trained = StepTrained(
            step=1, policy_version=1, datums_sha256="", num_datums=0, training_logprobs={}, metrics={}
        )
        await recorder.record(trained)
    (folder / "config.json").write_text(json.dumps(settings))
    return rollout


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wrong(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Recorded]:
    """A rollout that wrote something else into the field, and gave up."""
    way, folder = await find_way(), tmp_path_factory.mktemp("runs") / "wrong"
    click = way[0]
    rollout = await record(folder, [click, "type wrong", "finish failure"])
    assert (rollout.error, rollout.success, len(rollout.turns)) == (None, False, 3)
    yield Recorded(folder=folder, rollout=rollout, way=way)


async def successes(folder: Path) -> list[Rollout]:
    async with open_run_database(str(folder), {}, "from_run") as (database, name), database.sessions() as session:
        found = await load_successes(
            session, await find_training_id(database, name), num_steps=None, max_per_task=None, seed=0
        )
        return list(found.rollouts)


async def take(wrong: Recorded, turn: int, words: Sequence[str], folder: Path) -> None:
    config = TakeOverConfig(
        log_path=wrong.folder, rollout_id=wrong.rollout.rollout_id[:8], turn=turn, demonstrations=folder
    )
    await cli_main(config, {}, lines=lambda: say(words))


async def test_a_page_is_brought_to_a_turn_and_what_is_done_from_there_is_what_sft_learns(
    wrong: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demonstrations"

    # the field has the focus already; the way ends with the button and the end of the task
    await take(wrong, 2, wrong.way[1:], folder)
    said = capsys.readouterr().out
    await take(wrong, 1, ["wait 0", *wrong.way], folder)
    await take(wrong, 3, ["finish"], folder)  # what is in the field is wrong

    assert "done; learn from it: python -m cua_rl.recipes.sft data=rollouts" in said
    assert "nothing is learned from it" in capsys.readouterr().out
    first, second = await successes(folder)
    assert (first.parent_id, first.fork_turn, second.parent_id) == (wrong.rollout.rollout_id, 1, None)
    assert first.turns[0].model.response_id == wrong.rollout.turns[0].model.response_id
    assert first.turns[1].agent.before == wrong.rollout.turns[1].agent.before
    assert first.turns[-1].agent.before != wrong.rollout.turns[-1].agent.before
    trained = [
        sum(datum.num_trained_tokens for datum in example)
        for example in build_recorded_examples([first, second], RENDERER.image_token_id)
    ]
    assert trained == [sum(len(turn.model.sampled_tokens) for turn in one.own_turns) for one in (first, second)]
    assert 0 < trained[0] < trained[1]


async def test_a_page_that_does_not_show_what_was_recorded_is_not_taken_over(wrong: Recorded, tmp_path: Path) -> None:
    other = miniwob_template("enter-text").make_task(SEED + 1)
    async with open_own_database(wrong.folder) as url, open_sessions(url) as sessions, sessions.begin() as session:
        await session.execute(text("UPDATE rollouts SET seed = :seed"), {"seed": other.seed})
    try:
        with pytest.raises(DeviceError, match=r"turn 1: expected the screenshot that was recorded before it"):
            await take(wrong, 2, ["finish"], tmp_path / "demonstrations")
    finally:
        async with open_own_database(wrong.folder) as url, open_sessions(url) as sessions, sessions.begin() as session:
            await session.execute(text("UPDATE rollouts SET seed = :seed"), {"seed": SEED})
