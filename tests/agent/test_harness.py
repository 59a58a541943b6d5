"""Programs that bring their own world and score, against a real gateway on a socket and a fake model server.

One test per rule of docs/agents.md by which a run is judged, in their order.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.agent.harness import HarnessAssignment, HarnessService, RunEnd
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.harness_world import HarnessResult, parse_result
from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rl.advantages import score_group
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Rollout, RolloutGroup, StopReason
from tests.agent.harness_bench import PROGRAM, PYTHON, Bench, open_bench, run_out_of_time
from tests.live_processes import processes_with
from tests.patience import IdleClock, patience


@pytest_asyncio.fixture
async def bench(small_renderer: Qwen3VLRenderer, tmp_path: Path) -> AsyncGenerator[Bench]:
    async with open_bench(small_renderer, tmp_path) as opened:
        yield opened


def outcome(rollout: Rollout) -> tuple[StopReason, float | None]:
    return rollout.stop_reason, None if rollout.reward is None else rollout.reward.total


async def test_rule_1_a_sampling_failure_is_a_fault_whatever_the_program_reports_of_it(bench: Bench) -> None:
    bench.fake.failures.extend([500])

    rollout = await bench.run("assert ask() == 503; report(reward=1.0, success=True)")

    assert outcome(rollout) == (StopReason.SAMPLING_ERROR, None)


async def test_rule_1_a_sampling_failure_after_a_result_is_a_fault(bench: Bench) -> None:
    bench.fake.failures.extend([200, 500])

    rollout = await bench.run("ask(); report(reward=1.0); ask(); time.sleep(60)")

    assert outcome(rollout) == (StopReason.SAMPLING_ERROR, None)


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        ("ask(); report(reward=1.0); hang()", (StopReason.MAX_TIME, 1.0)),  # its world is as it left it
        ("ask(); hang()", (StopReason.MAX_TIME, 0.0)),
        ("ask(); report(fault={'kind': 'environment'}); hang()", (StopReason.DEVICE_ERROR, None)),
        ("hang()", (StopReason.TIME_LIMIT, None)),  # the policy has done nothing yet
    ],
)
async def test_rule_3_a_program_out_of_time_is_judged_by_what_it_reported(
    bench: Bench, script: str, ended: tuple[StopReason, float | None]
) -> None:
    rollout = await run_out_of_time(bench, lambda limits: bench.run(script, time_limits=limits))

    assert outcome(rollout) == ended


async def test_rule_2_a_program_that_a_signal_ends_is_a_fault_even_with_a_result(bench: Bench) -> None:
    rollout = await bench.run("ask(); report(reward=1.0); os.kill(os.getpid(), signal.SIGKILL)")

    assert outcome(rollout) == (StopReason.TASK_ERROR, None)
    assert "signal 9" in (rollout.error or "")


async def test_rule_2_a_signal_is_a_fault_even_once_the_policy_is_out_of_turns(bench: Bench) -> None:
    rollout = await bench.run("ask(); ask(); assert ask() == 403; os.kill(os.getpid(), signal.SIGKILL)")

    assert outcome(rollout) == (StopReason.TASK_ERROR, None)


async def test_rule_3_a_driver_that_hangs_ends_too(bench: Bench) -> None:
    """As a browser's driver that never answers: it ignores requests to end, and so does the program that waits."""
    driver = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); time.sleep(600)"
    script = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
driver = subprocess.Popen([sys.executable, "-c", {driver!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(os.environ["CUA_WORK_DIR"], flush=True)
ask(); report(reward=1.0)
print("hangs", flush=True)
driver.stdout.readline()
"""
    rollout = await run_out_of_time(bench, lambda limits: bench.run(script, time_limits=limits))

    assert outcome(rollout) == (StopReason.MAX_TIME, 1.0)
    assert processes_with(bench.log().split()[0]) == []


class AsksUntilRefused:
    """Never ends by itself; in this process, so that no interpreter's start counts as its time."""

    async def work(self, assignment: HarnessAssignment, over: asyncio.Event) -> RunEnd:
        told = assignment.variables()
        headers = {"Authorization": f"Bearer {told['OPENAI_API_KEY']}"}
        body = {"model": told["CUA_MODEL"], "messages": [{"role": "user", "content": "go"}]}
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                answer = await http.post(f"{told['OPENAI_BASE_URL']}/chat/completions", json=body, headers=headers)
                if answer.is_error:
                    break
        await over.wait()
        return RunEnd(status=None, result=HarnessResult(reward=0.5))


async def test_rule_2_a_program_that_hangs_once_the_policy_is_out_of_turns_is_no_fault(bench: Bench) -> None:
    rollout = await bench.run_program(AsksUntilRefused(), time_limits=DeviceConfig(task_timeout_s=2.0))

    assert outcome(rollout) == (StopReason.MAX_TURNS, 0.5)


@pytest.mark.parametrize(("script", "reward"), [("report(reward=0.25)", 0.25), ("", 0.0), ("sys.exit(1)", 0.0)])
async def test_rule_3_a_refusal_for_turns_gives_the_reported_reward_or_0(
    script: str, reward: float, bench: Bench
) -> None:
    rollout = await bench.run(f"ask(); ask(); assert ask() == 403; {script}")

    assert outcome(rollout) == (StopReason.MAX_TURNS, reward)
    assert len(rollout.turns) == 2


async def test_rule_3_a_refusal_for_context_is_no_fault_either(bench: Bench) -> None:
    rollout = await bench.run("ask(); assert ask('word ' * 3000) == 400; sys.exit('too long')")

    assert outcome(rollout) == (StopReason.CONTEXT_OVERFLOW, 0.0)


async def test_a_program_whose_own_request_exceeds_the_context_is_a_fault(bench: Bench) -> None:
    rollout = await bench.run("ask(); assert ask('word ' * 3000, **{'CUA-Train': 'no'}) == 400; sys.exit('too long')")

    assert outcome(rollout) == (StopReason.TASK_ERROR, None)


async def test_rule_4_status_78_stops_the_run_with_the_programs_message(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="no browser installed"):
        await bench.run("print('no browser installed'); sys.exit(78)")


async def test_rule_5_status_78_after_an_answer_is_a_fault_of_one_rollout(bench: Bench) -> None:
    assert outcome(await bench.run("ask(); sys.exit(78)")) == (StopReason.TASK_ERROR, None)


@pytest.mark.parametrize(
    ("script", "stop_reason"),
    [
        ("report(reward=0.0, fault={'kind': 'environment', 'message': 'lost'})", StopReason.DEVICE_ERROR),
        ("report(reward=0.0, fault={'kind': 'model', 'message': 'lost'})", StopReason.SAMPLING_ERROR),
        ("report(reward=0.0, fault={'kind': 'harness', 'message': 'lost'})", StopReason.TASK_ERROR),
        ("report(reward=0.0, fault='lost')", StopReason.TASK_ERROR),
        ("report(reward=1.0); print('lost'); sys.exit(75)", StopReason.TASK_ERROR),
        ("report(reward=1.0); sys.exit('lost')", StopReason.TASK_ERROR),
    ],
)
async def test_rule_5_a_reported_fault_or_another_status_is_a_fault_even_after_answers(
    script: str, stop_reason: StopReason, bench: Bench
) -> None:
    rollout = await bench.run(f"ask(); {script}")

    assert outcome(rollout) == (stop_reason, None)
    assert "lost" in (rollout.error or "")
    assert len(rollout.turns) == 1
    group = RolloutGroup(group_id="g", index=0, task_id="game", seed=5, rollouts=(), faulty=(rollout,))
    assert rollout_metrics([group])[f"rollout/faults/{stop_reason}"] == 1.0


async def test_rule_5_a_browser_that_is_killed_is_a_fault_though_the_model_was_about_to_succeed(bench: Bench) -> None:
    script = """
browser = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
ask(); report(reward=0.5)
browser.kill(); browser.wait()
browser.stdin.write(b"click"); browser.stdin.flush()  # BrokenPipeError
report(reward=1.0, success=True)
"""
    rollout = await bench.run(script)

    assert outcome(rollout) == (StopReason.TASK_ERROR, None)
    assert "BrokenPipeError" in (rollout.error or "")


async def test_rule_6_a_finite_reward_after_an_answer_is_the_rollouts_reward(bench: Bench) -> None:
    rollout = await bench.run(
        "ask(); report(reward=-1.5, success=True, metrics={'guesses': 3, 'odd': 'x'}, answer='crane', fault=None)"
    )

    assert outcome(rollout) == (StopReason.FINISHED, -1.5)
    assert (rollout.success, rollout.answer, rollout.device_id) == (True, "crane", "harness")
    assert [turn.model.text for turn in rollout.turns] == ["done"]
    assert rollout.turns[0].agent.before is None  # nothing but text
    assert rollout.validation is not None
    assert dict(rollout.validation.metrics) == {"guesses": 3.0}
    group = RolloutGroup(group_id="g", index=0, task_id="game", seed=5, rollouts=(rollout,))
    assert rollout_metrics([group])["rollout/harness/guesses"] == 3.0


@pytest.mark.parametrize(("reward", "success"), [(1.0, True), (0.99, False)])
async def test_where_the_program_leaves_success_open_a_reward_of_1_is_one(
    reward: float, success: bool, bench: Bench
) -> None:
    assert (await bench.run(f"ask(); report(reward={reward}, success=None)")).success is success


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("report(reward=1.0)", "without calling the model"),
        ("ask()", "got no result"),
        ("ask(); report(reward=float('nan'))", "got the reward nan"),
        ("ask(); report(reward=float('-inf'))", "got the reward -inf"),
        ("ask(); report(reward=10**400)", "got the reward 1000000"),
        ("ask(); report(reward=1e160)", "a reward from -1,000,000 to 1,000,000, got the reward 1e+160"),
        ("ask(); report(reward=-1000001)", "got the reward -1000001"),
        ("ask(); report(reward=True)", "got the reward True"),
        ("ask(); report(success=True)", "got the reward None"),
        ("ask(); report(reward=1.0, success=1)", "got the success 1; report true, false or null"),
        ("ask(); report(reward=1.0, success='true')", "got the success 'true'"),
        ("ask(); report(reward='1.0')", "got the reward '1.0'; report a number"),
    ],
)
async def test_rule_7_anything_else_is_a_fault(script: str, complaint: str, bench: Bench) -> None:
    rollout = await bench.run(script)

    assert outcome(rollout) == (StopReason.TASK_ERROR, None)
    assert complaint in (rollout.error or "")


async def test_the_largest_rewards_and_metrics_can_be_compared_and_averaged(bench: Bench) -> None:
    report = "report(reward={}, metrics={{'far': 1e100, 'too_far': 1e308}})"
    rollouts = [await bench.run(f"ask(); {report.format(reward)}", rollout_id=f"r{reward}") for reward in (-1e6, 1e6)]

    group = RolloutGroup(group_id="g", index=0, task_id="game", seed=5, rollouts=tuple(rollouts))
    assert score_group(group, "mean_std").advantages == (-1.0, 1.0)
    metrics = rollout_metrics([group])
    assert metrics["rollout/harness/far"] == 1e100
    assert "rollout/harness/too_far" not in metrics


def test_a_program_cannot_report_metrics_without_end() -> None:
    result = parse_result({"reward": 1, "metrics": {"long" * 100: 1.0} | {str(number): 1 for number in range(200)}})

    assert len(result.metrics) == 100
    assert max(map(len, result.metrics)) == 100


async def test_answers_that_the_program_does_not_want_trained_are_no_turns_and_cost_none(bench: Bench) -> None:
    probe = "ask('probe', **{'CUA-Train': 'no'})"
    script = f"[{probe} for _ in range(3)]; ask(); {probe}; ask(); assert ask() == 403; report(reward=0.5)"

    rollout = await bench.run(script)
    only_probed = await bench.run(f"{probe}; report(reward=1.0)")
    misspelt = await bench.run("ask(); print(ask('probe', **{'CUA-Train': 'never'})); report(reward=1.0)")

    assert outcome(rollout) == (StopReason.MAX_TURNS, 0.5)
    assert [turn.model.request["messages"][0]["content"] for turn in rollout.turns] == ["go", "go"]
    assert outcome(only_probed) == (StopReason.TASK_ERROR, None)
    assert (outcome(misspelt), len(misspelt.turns)) == ((StopReason.FINISHED, 1.0), 1)
    assert bench.log().split()[-1] == "400"


async def test_a_program_gets_its_task_and_a_folder_that_is_gone_afterwards(bench: Bench) -> None:
    row = {"task_id": "wordle/1", "seed": 7, "instruction": "Guess.", "max_turns": 4, "payload": {"word": "crane"}}

    judge = {"JUDGE_BASE_URL": "https://judge/v1", "JUDGE_MODEL": "judge-1"}

    await bench.run("print(json.dumps(dict(os.environ) | {'stdin': task()}))", row=row, judge=judge)

    seen = json.loads(bench.log())
    assert seen["stdin"] == {"word": "crane"}
    assert "crane" not in json.dumps(seen | {"stdin": None})
    told = [seen[f"CUA_{name}"] for name in ("TASK_ID", "SEED", "INSTRUCTION", "MAX_TURNS", "ROLLOUT_ID")]
    assert told == ["wordle/1", "7", "Guess.", "4", "r1"]
    assert {name: seen[f"CUA_{name}"] for name in judge} == judge
    assert 1800 - patience(10) < float(seen["CUA_DEADLINE_S"]) <= 1800
    assert Path(seen["CUA_RESULT_PATH"]).parent == Path(seen["CUA_WORK_DIR"])
    assert not Path(seen["CUA_WORK_DIR"]).exists()


GRANDCHILD = """
ready, told = os.pipe()
subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
print(os.environ["CUA_WORK_DIR"], flush=True)
os.write(int(sys.argv[1]), b"x")
time.sleep(600)
''', str(told)], pass_fds=[told])
os.read(ready, 1)
ask(); report(reward=1.0)
"""


async def test_everything_that_a_program_started_ends_with_it(bench: Bench) -> None:
    rollout = await bench.run(GRANDCHILD)

    assert outcome(rollout) == (StopReason.FINISHED, 1.0)
    assert processes_with(bench.log().split()[0]) == []


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from cua_rl.agent.agent import AgentTask, ModelAddress
from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessAssignment, HarnessCommand
from cua_rl.environments.harness_world import HarnessWorld

assignment = HarnessAssignment(
    task=AgentTask(rollout_id="r1", instruction="", max_turns=1), world=HarnessWorld("game", 0),
    address=ModelAddress(url="http://127.0.0.1:9", api_key=""), deadline_s=600.0, judge={},
)
command = AgentCommand(argv=(sys.argv[1], "-c", sys.argv[2]), log_folder=Path(sys.argv[3]))
asyncio.run(HarnessCommand(command).work(assignment, asyncio.Event()))
"""


def test_everything_that_a_program_started_ends_if_the_controller_is_killed(tmp_path: Path) -> None:
    script = PROGRAM + GRANDCHILD.partition("ask()")[0] + "time.sleep(600)"
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, PYTHON, script, str(tmp_path)])
    log = tmp_path / "r1.log"
    while not log.exists() or not log.read_text().endswith("\n"):
        assert controller.poll() is None
        time.sleep(0.05)
    word = log.read_text().strip()
    assert len(processes_with(word)) >= 2

    os.kill(controller.pid, signal.SIGKILL)
    controller.wait()

    clock = IdleClock()
    while processes_with(word) and clock.look() < 20:
        time.sleep(0.05)
    assert processes_with(word) == []


async def test_eight_at_a_time_cross_no_reward_and_no_request(bench: Bench) -> None:
    script = "given = task(); ask(json.dumps(given)); report(reward=given['worth'])"
    rows = [{"task_id": f"game{i}", "payload": {"worth": i}} for i in range(8)]

    rollouts = await asyncio.gather(*(bench.run(script, row=row, rollout_id=row["task_id"]) for row in rows))

    assert [outcome(rollout) for rollout in rollouts] == [(StopReason.FINISHED, float(i)) for i in range(8)]
    for row, rollout in zip(rows, rollouts, strict=True):
        (turn,) = rollout.turns
        assert turn.model.request["messages"] == [{"role": "user", "content": json.dumps(row["payload"])}]


async def serve_and_run(bench: Bench, answer: Response, **options: Any) -> tuple[Rollout, dict[str, str]]:
    told: dict[str, str] = {}

    async def endpoint(request: Request) -> Response:
        told.update(await request.json())
        return answer

    app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    async with serve_app(app, "127.0.0.1", 0, grace_s=0) as url:
        return await bench.run_program(HarnessService(url=url), **options), told


async def test_a_server_gets_the_same_fields_and_answers_with_the_result(bench: Bench) -> None:
    rollout, told = await serve_and_run(bench, JSONResponse({"reward": 1.0}))
    faulty, _ = await serve_and_run(bench, JSONResponse({"fault": {"kind": "environment", "message": "down"}}))
    broken, _ = await serve_and_run(bench, Response(status_code=500))

    assert (told["CUA_TASK_ID"], told["CUA_SEED"]) == ("game", "5")
    assert "without calling the model" in (rollout.error or "")
    assert outcome(faulty) == (StopReason.DEVICE_ERROR, None)
    assert "answered 500" in (broken.error or "")


async def test_a_server_that_hangs_is_left_when_its_time_is_up(bench: Bench) -> None:
    async def endpoint(request: Request) -> Response:
        await asyncio.Event().wait()
        return Response()

    app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    async with serve_app(app, "127.0.0.1", 0, grace_s=0) as url:
        clock = IdleClock()
        rollout = await bench.run_program(HarnessService(url=url), time_limits=DeviceConfig(task_timeout_s=0.2))

    assert outcome(rollout) == (StopReason.TIME_LIMIT, None)
    assert clock.look() < 10
