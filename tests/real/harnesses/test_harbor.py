"""Harbor's own library: `examples/harnesses/make_environment.sh harbor` makes its environment."""

import asyncio
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessCommand
from cua_rl.exchange.atif import AtifWriter
from cua_rl.exchange.rows import encode_record, encode_run
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rewards.reward import as_reward
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Rollout, SamplingParams, StopReason
from tests.agent.harness_bench import Bench, open_bench
from tests.exchange.test_files import RUN, records
from tests.real.database.recorded import IMAGE_TOKEN
from tests.real.harnesses.harbor_registry import DOUBLES, EXAMPLE, PYTHON, TASKS, open_folder, open_registry, reward_of

pytestmark = pytest.mark.timeout(900)

PROCESSES = {"import_path": "process_environment:ProcessEnvironment"}
ANSWER = {"import_path": "answer_agent:AnswerAgent"}
HELLO = {"path": str(EXAMPLE / "tasks" / "hello")}
VOWELS = {"path": str(EXAMPLE / "tasks" / "vowels")}


@pytest_asyncio.fixture
async def bench(small_renderer: Qwen3VLRenderer, tmp_path: Path) -> AsyncGenerator[Bench]:
    params = SamplingParams(max_tokens=600, temperature=1.0)  # its tokens are bytes
    async with open_bench(small_renderer, tmp_path, params=params, max_model_len=64_000) as opened:
        yield opened


def interpreter() -> Path:
    if not PYTHON.exists():
        pytest.skip("no environment of the example harbor; make test-harnesses makes it")
    return PYTHON


async def play(
    bench: Bench,
    payload: dict[str, Any],
    *answers: str,
    name: str = "r1",
    max_turns: int = 8,
    programs: tuple[Path, ...] = (),
) -> Rollout:
    """One rollout with scripted answers of the model, in processes unless the payload says otherwise."""
    bench.fake.answers.extend(answers)
    argv = (str(interpreter()), *map(str, programs), str(EXAMPLE / "wrapper.py"))
    command = AgentCommand(argv=argv, log_folder=bench.folder)
    row = {"task_id": "task", "max_turns": max_turns, "payload": {"environment": PROCESSES} | payload}
    return await bench.run_program(HarnessCommand(command), row=row, rollout_id=name)


def commands(*keystrokes: str, is_done: bool = False) -> str:
    """An answer as terminus-2 asks for it."""
    lines = [{"keystrokes": f"{line}\n", "duration": 1.0} for line in keystrokes]
    return json.dumps({"analysis": "", "plan": "", "commands": lines, "task_complete": is_done})


SAY_HELLO = commands("echo 'Hello, world!' > hello.txt")
DONE = commands(is_done=True)


async def test_terminus_solves_a_task_and_the_verifier_pays(bench: Bench) -> None:
    rollout = await play(bench, {"task": HELLO}, SAY_HELLO, DONE, DONE)  # it asks twice whether the task is done

    assert (rollout.error, rollout.success, len(rollout.turns)) == (None, True, 3)
    assert rollout.reward is not None
    assert rollout.reward.total == 1.0
    for earlier, later in pairwise(turn.model for turn in rollout.turns):  # so that all are one training sequence
        known = [*earlier.prompt.token_ids(0), *earlier.sampled_tokens]
        assert later.prompt.token_ids(0)[: len(known)] == known


async def test_what_the_model_gets_wrong_is_a_reward_of_0_with_a_verdict(bench: Bench) -> None:
    odd = json.dumps({"analysis": "", "plan": "", "commands": [{"keystrokes": "a\0b\ud83d\n", "duration": 0.1}]})

    rollout = await play(bench, {"task": HELLO}, "Hm.", odd, commands("exit"), max_turns=3)

    assert (rollout.error, rollout.success) == (None, False)
    assert rollout.reward is not None
    assert rollout.reward.total == 0.0


async def test_an_agent_that_asks_after_the_last_turn_is_graded_for_what_it_did(bench: Bench) -> None:
    more = {"agent": {"kwargs": {"max_turns": 5}}}

    rollout = await play(bench, {"task": HELLO} | more, SAY_HELLO, max_turns=1)

    assert (rollout.error, rollout.success, len(rollout.turns)) == (None, True, 1)


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'computer_use', 'arguments': arguments})}\n</tool_call>"


@pytest.mark.skipif(not (shutil.which("Xvfb") and shutil.which("xmessage")), reason="needs Xvfb and xmessage")
@pytest.mark.skipif(Path("/usr/bin/chromium").exists(), reason="the agent would start it above the window")
async def test_harbors_computer_agent_sees_a_desktop_and_presses_its_button(bench: Bench) -> None:
    size = {f"{what}_{side}": px for what in ("desktop", "window") for side, px in (("width", 800), ("height", 600))}
    agent = {"name": "computer-1", "kwargs": size}
    yes = [154, 472]  # 123 of 800, 283 of 600

    rollout = await play(
        bench,
        {"task": {"path": str(DOUBLES / "harbor_tasks" / "button")}, "agent": agent},
        *(
            call(action="screenshot"),
            call(action="left_click", coordinate=yes),
            call(action="terminate", status="success"),
        ),
    )

    assert (rollout.error, rollout.success, len(rollout.turns)) == (None, True, 3)
    shown = rollout.turns[2].model.prompt.images
    assert [(image.width_px, image.height_px) for image in shown] == [(800, 600)] * 2
    assert shown[0].sha256 != shown[1].sha256  # the window has closed


NUM_VOWELS = {"sky": 1, "a sky": 2, "my blue sky": 3, "my quick fox jumps over a hen": 6, "ssh": 0}
"""Of the six; each is a sixth of the reward."""


async def test_fractional_rewards_are_the_verifiers_to_the_last_bit_eight_at_a_time(bench: Bench) -> None:
    answers = [*NUM_VOWELS, *list(NUM_VOWELS)[:3]]
    payload = {"task": VOWELS, "agent": ANSWER}

    bench.fake.answers.extend(answers)
    rollouts = await asyncio.gather(*(play(bench, payload, name=f"r{number}") for number in range(8)))

    assert [rollout.error for rollout in rollouts] == [None] * 8
    assert sorted(rollout.turns[0].model.text for rollout in rollouts) == sorted(answers)
    for rollout in rollouts:
        num_vowels = NUM_VOWELS[rollout.turns[0].model.text]
        assert rollout.reward is not None
        assert rollout.reward.parts == {"score": num_vowels / 6}
        assert rollout.reward.total == as_reward(num_vowels / 6)
        assert rollout.success == (num_vowels == 6)


async def test_the_tasks_of_a_registry_name_are_paid_to_the_last_bit_eight_at_a_time(bench: Bench) -> None:
    interpreter()
    bench.fake.answers.extend(f"{'sky ' * number}ahead" for number in range(9))
    with open_registry() as command:
        listed = await asyncio.to_thread(subprocess.check_output, shlex.split(command), text=True)
        rows = [json.loads(line) for line in listed.splitlines() if line.startswith("{")]
        rollouts = await asyncio.gather(
            *(play(bench, row["payload"], name=f"{row['task_id']}-{number}") for row in rows for number in range(3))
        )

    assert [row["task_id"] for row in rows] == list(TASKS)

    assert [rollout.error for rollout in rollouts] == [None] * 9
    for rollout in rollouts:
        assert rollout.reward is not None
        expected = reward_of(rollout.rollout_id.partition("-")[0], rollout.turns[0].model.text)
        assert rollout.reward.parts == {"score": expected}
    assert len({rollout.turns[0].model.text for rollout in rollouts}) == 9


async def test_another_of_the_verifiers_rewards_can_be_the_reward(bench: Bench) -> None:
    payload = {"task": VOWELS, "agent": ANSWER, "reward": "characters", "success": 11}

    rollout = await play(bench, payload, "my blue sky")

    assert rollout.reward is not None
    assert (rollout.reward.total, rollout.success) == (11.0, True)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"environment_build_timeout_multiplier": 1e-6}, "EnvironmentStartTimeoutError"),
        ({"verifier": {"override_timeout_sec": 0.001}}, "VerifierTimeoutError"),
        ({"verifier": {"disable": True}}, "expected rewards of the verifier, got none"),
        ({"reward": "speed"}, "expected the reward 'speed', got {'reward': 0.5, 'shaped': 0.59"),
        ({"task": {"path": str(DOUBLES / "harbor_tasks" / "no_reward")}}, "RewardFileNotFoundError"),
    ],
)
async def test_what_the_environment_or_the_verifier_causes_is_a_fault(
    payload: dict[str, Any], reason: str, bench: Bench
) -> None:
    rollout = await play(bench, {"task": VOWELS, "agent": ANSWER} | payload, "my blue sky")

    assert (rollout.stop_reason, rollout.reward) in [(StopReason.DEVICE_ERROR, None), (StopReason.TASK_ERROR, None)]
    assert reason in str(rollout.error) + bench.log()


async def test_an_agent_that_does_not_exist_ends_the_run(bench: Bench) -> None:
    payload = {"task": VOWELS, "agent": {"import_path": "answer_agent:NoSuchAgent"}}
    with pytest.raises(ConfigError, match="has no class 'NoSuchAgent'"):
        await play(bench, payload, "my blue sky")


REWARD = "/logs/verifier/reward"


@pytest.mark.parametrize(
    ("script", "reward", "reason"),
    [
        (f"echo 'all is well' >{REWARD}.json", None, "VerifierOutputParseError"),
        (f"echo high >{REWARD}.txt", None, "VerifierOutputParseError"),
        (f"""echo '{{"reward": NaN}}' >{REWARD}.json""", None, "Non-finite reward nan"),
        (f"""echo '{{"reward": 1e999}}' >{REWARD}.json""", None, "Non-finite reward inf"),
        (f"""echo '{{"speed": 1}}' >{REWARD}.json""", None, "expected the reward 'reward', got"),
        ("kill -9 $$", None, "RewardFileNotFoundError"),
        (f"sleep 900; echo 1 >{REWARD}.txt", None, "VerifierTimeoutError"),
        (f"head -c 9000000 /dev/urandom; echo 0.25 >{REWARD}.txt", 0.25, ""),
        (f"echo 0.75 >{REWARD}.txt; exit 3", 0.75, ""),
    ],
)
async def test_an_odd_verifier_is_a_fault_unless_it_pays(
    script: str, reward: float | None, reason: str, bench: Bench
) -> None:
    with open_folder() as folder:
        shutil.copytree(DOUBLES / "harbor_tasks" / "no_reward", folder / "task")
        (folder / "task" / "tests" / "test.sh").write_text(f"#!/bin/bash\n{script}\n")
        payload = {"task": {"path": str(folder / "task")}, "agent": ANSWER, "verifier": {"override_timeout_sec": 20}}
        rollout = await play(bench, payload, "my blue sky")

    assert (rollout.reward and rollout.reward.total) == reward, rollout.error
    assert (rollout.error is None) == (reward is not None)
    assert reason in str(rollout.error) + bench.log()


@pytest.mark.parametrize(
    ("script", "reward", "reason"),
    [(f"echo 0.5 >{REWARD}.txt", 0.75, ""), ("true", None, "RewardFileNotFoundError"), ("exit 1", None, "NotFound")],
)
async def test_a_step_without_a_verdict_is_a_fault_of_the_task_although_harbor_leaves_it_out_of_the_mean(
    script: str, reward: float | None, reason: str, bench: Bench
) -> None:
    with open_folder() as folder:
        shutil.copytree(DOUBLES / "harbor_tasks" / "no_reward" / "environment", folder / "task" / "environment")
        steps = {"first": f"echo 1 >{REWARD}.txt", "second": script}
        settings = "".join(f'[[steps]]\nname = "{step}"\n' for step in steps)
        (folder / "task" / "task.toml").write_text(f'schema_version = "1.4"\n[task]\nname = "cua-rl/steps"\n{settings}')
        for step, said in steps.items():
            tests = folder / "task" / "steps" / step / "tests"
            tests.mkdir(parents=True)
            (tests / "test.sh").write_text(f"#!/bin/bash\n{said}\n")
            (tests.parent / "instruction.md").write_text("Write.")
        rollout = await play(bench, {"task": {"path": str(folder / "task")}, "agent": ANSWER}, "my", "sky")

    assert (rollout.reward and rollout.reward.total) == reward, rollout.error
    assert reason in str(rollout.error) + bench.log()


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        ({"task": {"path": str(EXAMPLE)}}, "expected task.toml in task.path"),
        ({"task": {"path": str(DOUBLES / "harbor_tasks" / "needs_image")}}, "got ADD 'x /app/'"),
        ({"task": HELLO, "environment": {"type": "no_such_cloud"}}, "expected a payload with the fields"),
    ],
)
async def test_a_payload_that_can_never_run_stops_the_run_with_a_sentence(
    payload: dict[str, Any], sentence: str, bench: Bench
) -> None:
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
        await play(bench, payload)


async def test_harbors_docker_environment_asks_docker_for_what_a_trial_needs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{DOUBLES / 'harbor_docker'}:{os.defpath}")

    watch = (DOUBLES / "harbor_docker" / "watch.py",)
    rollout = await play(bench, {"task": VOWELS, "agent": ANSWER, "environment": {}}, "my blue sky", programs=watch)

    assert rollout.error is None
    assert rollout.reward is not None
    assert rollout.reward.parts == {"score": 3 / 6}
    requests = [line for line in bench.log().splitlines() if line.startswith("docker compose")]
    asked = [
        next(word for word in ("build", "up", "exec", "cp", "down") if f" {word} " in f"{line} ") for line in requests
    ]
    assert list(dict.fromkeys(asked)) == ["build", "down", "up", "exec", "cp"]
    assert "--volumes" in requests[-1]
    assert str(EXAMPLE / "tasks" / "vowels" / "environment") in requests[0]


@pytest.mark.skipif(shutil.which("docker", path=os.defpath) is not None, reason="this machine has Docker")
async def test_a_machine_without_docker_stops_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)

    with pytest.raises(ConfigError, match="Docker is not installed"):
        await play(bench, {"task": HELLO, "environment": {}})


async def test_a_docker_daemon_that_does_not_answer_is_a_fault_as_it_may_come_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{DOUBLES / 'harbor_docker_without_daemon'}:{os.defpath}")

    rollout = await play(bench, {"task": HELLO, "environment": {}})

    assert (rollout.stop_reason, rollout.reward) == (StopReason.TASK_ERROR, None)
    assert "expected a Docker daemon that answers this user" in str(rollout.error)


VALIDATE = """
import sys
from harbor.utils.trajectory_validator import TrajectoryValidator
for path in sys.argv[1:]:
    validator = TrajectoryValidator()
    print(validator.validate(path), *validator.errors)
"""


def test_harbor_accepts_the_trajectories_that_an_export_writes(tmp_path: Path) -> None:
    with AtifWriter(tmp_path, encode_run(RUN)) as writer:
        for record in records():
            writer.write(record, encode_record(record, IMAGE_TOKEN))
    paths = sorted((tmp_path / "trajectories").glob("*.json"))

    done = subprocess.run([interpreter(), "-c", VALIDATE, *paths], capture_output=True, text=True)

    assert done.stdout.split("\n") == ["True"] * len(records()) + [""], done.stderr


def test_harbor_refuses_a_trajectory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"schema_version": "ATIF-v1.7", "steps": []}')

    done = subprocess.run([interpreter(), "-c", VALIDATE, tmp_path / "a.json"], capture_output=True, text=True)

    assert done.stdout.startswith("False")
