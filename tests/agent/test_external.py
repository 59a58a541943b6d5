"""Agents in other processes, against a real gateway on a socket, a fake model server and a simulated phone."""

import asyncio
import json
import os
import shutil
import sys
import venv
from ast import literal_eval
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from cua_rl.agent.external import AgentCommand, AgentService, ExternalAgent
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.pool import DevicePool
from cua_rl.events import RolloutSource, TurnTaken
from cua_rl.host.guest_account import claim_guest_account
from cua_rl.host.http_server import serve_app
from cua_rl.host.sandbox import can_sandbox
from cua_rl.host.users import GUEST_UIDS, can_change_user
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rewards.reward import binary_reward
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer
from cua_rl.types.actions import Click, Wait
from cua_rl.types.errors import ConfigError, DeviceError
from cua_rl.types.rollout import Rollout, SamplingParams, StopReason
from tests.fakes import FakeDevice, FakeRecorder, make_task
from tests.patience import patience
from tests.sampling.fake_vllm import FakeVllm

PARAMS = SamplingParams(max_tokens=64, temperature=1.0)
MESSAGES = [{"role": "user", "content": "go"}]
PYTHON = shutil.which("python3", path=os.defpath) or sys.executable
"""For agents: those that root starts reach no interpreter below /root."""

Work = Callable[["Desk"], Awaitable[Any]]


class Desk:
    """What an agent has: the model's address and the device's, over plain HTTP."""

    def __init__(self, told: dict[str, str]) -> None:
        self.told = told
        self.http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {told['CUA_DEVICE_TOKEN']}"}, trust_env=False, timeout=patience(60)
        )

    async def ask(self) -> httpx.Response:
        body = {"model": "policy", "messages": MESSAGES}
        headers = {"Authorization": f"Bearer {self.told['OPENAI_API_KEY']}"}
        return await self.http.post(f"{self.told['OPENAI_BASE_URL']}/chat/completions", json=body, headers=headers)

    async def act(self, **arguments: object) -> httpx.Response:
        return await self.http.post(f"{self.told['CUA_DEVICE_URL']}/action", json=arguments)


class Bench:
    """A runner over a fake model server, whose agent is a function of the test behind a socket, or a command."""

    def __init__(self, gateway: Gateway, fake: FakeVllm, folder: Path) -> None:
        self.gateway, self.fake, self.folder = gateway, fake, folder
        self.device = FakeDevice()
        self.recorder = FakeRecorder()
        self.variables: tuple[str, ...] = ()
        self.task = make_task(max_turns=9)

    async def run(self, work: Work, *, max_turns: int = 3, time_limits: DeviceConfig | None = None) -> Rollout:
        async def endpoint(request: Request) -> JSONResponse:
            desk = Desk(await request.json())
            async with desk.http:
                return JSONResponse(await work(desk))

        async with serve_app(
            Starlette(routes=[Route("/", endpoint, methods=["POST"])]), "127.0.0.1", 0, grace_s=0
        ) as url:
            return await self._run(AgentService(url=url), max_turns, time_limits)

    async def run_command(self, *argv: str, max_turns: int = 3) -> Rollout:
        return await self._run(AgentCommand(argv=argv, log_folder=self.folder, variables=self.variables), max_turns)

    async def _run(
        self, program: AgentService | AgentCommand, max_turns: int, time_limits: DeviceConfig | None = None
    ) -> Rollout:
        async def make_device(task: object) -> Any:
            return self.device

        runner = RolloutRunner(
            devices=DevicePool(make_device, max_devices=1),
            gateway=self.gateway,
            agent=ExternalAgent(program, grace_s=0.5),
            reward=binary_reward,
            recorder=self.recorder,
            max_turns=max_turns,
            time_limits=time_limits or DeviceConfig(),
        )
        source = RolloutSource(phase="step", step=1)
        plan = RolloutJob(
            source=source,
            group_id="g",
            group_index=0,
            member_index=0,
            task=self.task,
            params=PARAMS,
            rollout_id="r1",
        )
        return await runner.run(plan)


@pytest_asyncio.fixture
async def bench(small_renderer: Qwen3VLRenderer, tmp_path: Path) -> AsyncGenerator[Bench]:
    fake = FakeVllm(small_renderer)
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        async with (
            ExternalServer(url) as server,
            SamplingClient(server, namespace="run", max_attempts=1, stall_timeout_s=0.4) as sampling,
        ):
            gateway = Gateway(sampling, small_renderer, PARAMS)
            async with gateway.serve():
                yield Bench(gateway, fake, tmp_path)


async def test_actions_need_a_content_type_only_where_a_browser_could_have_sent_them(bench: Bench) -> None:
    statuses: list[int] = []

    async def work(desk: Desk) -> Any:
        await desk.ask()
        url, token = f"{desk.told['CUA_DEVICE_URL']}/action", desk.told["CUA_DEVICE_TOKEN"]
        for sent in ({"Authorization": f"Bearer {token}"}, {"Authorization": "Bearer other"}, {}):
            async with httpx.AsyncClient(trust_env=False) as http:
                answer = await http.post(url, content=b'{"action": "wait", "time": 0}', headers=sent)
                statuses.append(answer.status_code)
        return {}

    await bench.run(work)

    assert statuses == [200, 401, 401]


async def test_turns_are_answers_joined_with_the_device_steps_that_followed_them(bench: Bench) -> None:
    async def work(desk: Desk) -> Any:
        await desk.ask()
        await desk.act(action="click", coordinate=[500, 1000])  # 100 x 200 pixels: (50, 200), clamped to 199
        await desk.act(action="wait", time=0)
        await desk.ask()
        told = await desk.act(action="fly")
        assert "Expected one of" in told.json()["error"]
        assert "Expected one of" in (await desk.act(action=["click"])).json()["error"]
        await desk.ask()
        bench.device.state = "1"
        assert (await desk.act(action="answer", text="42")).json()["finished"]

    rollout = await bench.run(work)

    assert rollout.error is None
    assert bench.device.actions == [Click(x=50, y=199), Wait(duration_s=0)]
    assert [turn.agent.action for turn in rollout.turns] == [Click(x=50, y=199), None, None]
    assert rollout.turns[0].agent.more_actions == (Wait(duration_s=0),)
    assert rollout.turns[0].agent.after is not None
    assert "fly" in (rollout.turns[1].agent.action_error or "")
    assert (rollout.stop_reason, rollout.answer, rollout.success) == (StopReason.FINISHED, "42", True)
    assert [turn.model.text for turn in rollout.turns] == ["done"] * 3
    assert len([event for event in bench.recorder.events if isinstance(event, TurnTaken)]) == 3


async def test_an_agent_that_asks_on_after_its_last_turn_is_refused_and_ended(bench: Bench) -> None:
    refusals: list[httpx.Response] = []

    async def work(desk: Desk) -> Any:
        while True:
            answer = await desk.ask()
            if answer.is_error:
                refusals.append(answer)
                await asyncio.sleep(1.0)  # longer than the agent is given
                return None

    rollout = await bench.run(work, max_turns=2)

    assert (rollout.stop_reason, len(rollout.turns)) == (StopReason.MAX_TURNS, 2)
    assert (refusals[0].status_code, refusals[0].json()["error"]["code"]) == (403, "max_turns_reached")


async def test_an_agent_that_waits_for_longer_than_it_has_ends_as_with_its_turns_used_up(bench: Bench) -> None:
    async def work(desk: Desk) -> Any:
        await desk.ask()
        await desk.act(action="wait", time=20)
        assert (await desk.ask()).status_code == 403
        await asyncio.Event().wait()

    rollout = await bench.run(work, time_limits=DeviceConfig(task_timeout_s=15.0))

    assert (rollout.stop_reason, rollout.reward and rollout.reward.total) == (StopReason.MAX_TIME, 0.0)
    assert [turn.agent.action for turn in rollout.turns] == [Wait(duration_s=20.0)]
    (waited,) = bench.device.actions
    assert isinstance(waited, Wait)
    assert waited.duration_s <= 15.0


async def test_an_agent_that_never_asks_in_its_time_is_a_fault(bench: Bench) -> None:
    async def work(desk: Desk) -> Any:
        await asyncio.Event().wait()

    rollout = await bench.run(work, time_limits=DeviceConfig(task_timeout_s=0.1))

    assert (rollout.stop_reason, rollout.reward) == (StopReason.TASK_ERROR, None)


async def test_a_model_server_that_hangs_is_a_fault_and_not_the_agents_time(bench: Bench) -> None:
    bench.fake.gate = asyncio.Event()

    async def work(desk: Desk) -> Any:
        await desk.ask()

    rollout = await bench.run(work, time_limits=DeviceConfig(turn_timeout_s=0.2, task_timeout_s=15.0))
    bench.fake.gate.set()

    assert (rollout.stop_reason, rollout.reward) == (StopReason.SAMPLING_ERROR, None)
    assert "got no token within 0.4 s" in (rollout.error or "")


TOO_MANY_IMAGES = (400, "At most 2 image(s) may be provided in one prompt.")


async def test_a_prompt_that_the_server_takes_from_nobody_stops_the_run_and_is_no_fault(bench: Bench) -> None:
    bench.fake.refusal = TOO_MANY_IMAGES

    async def work(desk: Desk) -> Any:
        assert (await desk.ask()).json()["error"]["code"] == "configuration"

    with pytest.raises(ConfigError, match="limit-mm-per-prompt"):
        await bench.run(work)


async def test_only_the_bearer_of_the_token_operates_the_device(bench: Bench) -> None:
    async def work(desk: Desk) -> Any:
        await desk.ask()
        async with httpx.AsyncClient(trust_env=False) as stranger:
            refused = await stranger.post(f"{desk.told['CUA_DEVICE_URL']}/action", json={"action": "click"})
            shown = await desk.http.get(f"{desk.told['CUA_DEVICE_URL']}/screenshot")
        return [refused.status_code, shown.content.decode(), shown.headers["x-screen-width"]]

    rollout = await bench.run(work)

    assert rollout.error is None
    assert bench.device.actions == []


async def test_a_command_that_fails_before_it_asks_is_a_fault_and_later_the_end_of_its_rollout(bench: Bench) -> None:
    ask = (
        "import os, json, urllib.request as u;"
        "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', "
        f"json.dumps({{'messages': {MESSAGES!r}}}).encode(), {{'Content-Type': 'application/json', "
        "'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}));"
    )

    broken = await bench.run_command(PYTHON, "-c", "import sys; sys.exit('no such model')")
    crashed = await bench.run_command(PYTHON, "-c", f"{ask} raise SystemExit(3)")

    assert (broken.stop_reason, broken.reward) == (StopReason.TASK_ERROR, None)
    assert "no such model" in (broken.error or "")
    assert (crashed.stop_reason, len(crashed.turns)) == (StopReason.FINISHED, 1)
    assert crashed.reward is not None
    assert "status 3" in (crashed.error or "")


@pytest.mark.parametrize("instruction", ["a\0b", "\ud83d", "x" * 200_000])
async def test_an_instruction_that_no_program_can_be_told_is_a_fault(bench: Bench, instruction: str) -> None:
    bench.task = replace(bench.task, instruction=instruction)

    rollout = await bench.run_command(PYTHON, "-c", "")

    assert (rollout.stop_reason, rollout.reward) == (StopReason.TASK_ERROR, None)
    assert "run the agent: " in (rollout.error or "")


async def test_an_agent_that_never_asks_the_model_is_a_fault(bench: Bench) -> None:
    rollout = await bench.run_command(PYTHON, "-c", "print('hello')")

    assert rollout.reward is None
    assert "without calling the model" in (rollout.error or "")
    assert (bench.folder / "r1.log").read_text() == "hello\n"


async def test_faults_of_model_and_device_are_faults_of_the_rollout_whatever_the_agent_makes_of_them(
    bench: Bench,
) -> None:
    class Broken(FakeDevice):
        async def execute(self, action: object) -> None:
            raise DeviceError("unplugged")

    async def asks(desk: Desk) -> Any:
        await desk.ask()
        bench.fake.failures.append(500)
        await desk.ask()

    async def acts(desk: Desk) -> Any:
        await desk.ask()
        await desk.act(action="wait", time=1)

    no_model = await bench.run(asks)
    bench.device = Broken()
    no_device = await bench.run(acts)

    assert (no_model.stop_reason, len(no_model.turns)) == (StopReason.SAMPLING_ERROR, 1)
    assert (no_device.stop_reason, len(no_device.turns)) == (StopReason.DEVICE_ERROR, 1)


async def test_an_action_for_whose_end_the_agent_does_not_wait_is_done_before_the_rollout_is_judged(
    bench: Bench,
) -> None:
    begun = asyncio.Event()

    class Slow(FakeDevice):
        async def execute(self, action: object) -> None:
            begun.set()
            await asyncio.sleep(0.1)
            self.state = "1"

    async def work(desk: Desk) -> Any:
        await desk.ask()
        acting = asyncio.create_task(desk.act(action="click", coordinate=[500, 500]))
        await begun.wait()
        acting.cancel()

    bench.device = Slow()
    rollout = await bench.run(work)

    assert (rollout.error, rollout.success) == (None, True)
    assert [turn.agent.action for turn in rollout.turns] == [Click(x=50, y=100)]


async def test_an_action_that_outlasts_its_rollout_is_answered_that_the_rollout_is_over(bench: Bench) -> None:
    told: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    released = asyncio.Event()

    class Stuck(FakeDevice):
        async def execute(self, action: object) -> None:
            await released.wait()

    async def work(desk: Desk) -> Any:
        told.set_result(desk.told)
        await asyncio.Event().wait()

    bench.device = Stuck()
    running = asyncio.create_task(bench.run(work, time_limits=DeviceConfig(turn_timeout_s=0.2)))
    desk = Desk(await told)
    async with desk.http:
        acting = asyncio.create_task(desk.act(action="click", coordinate=[500, 500]))
        rollout = await running
        released.set()
        answer = await acting

    assert rollout.stop_reason is StopReason.TIME_LIMIT
    assert answer.status_code == 409


SECRETS = (
    "DATABASE_URL", "JUDGE_API_KEY", "MONITOR_PROJECT_TOKEN", "MONITOR_READ_TOKEN", "PGPASSWORD", "SSH_AUTH_SOCK",
    "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS",
)  # fmt: skip


async def test_an_agent_gets_its_assignment_and_what_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, "MINE", "OTHER"):
        monkeypatch.setenv(name, "secret")
    bench.variables = ("MINE", "UNSET")

    await bench.run_command(PYTHON, "-c", "import os, json; print(json.dumps(dict(os.environ)))")

    seen = json.loads((bench.folder / "r1.log").read_text())
    assert not {*SECRETS, "OTHER", "UNSET"} & seen.keys()
    assert (seen["MINE"], seen["CUA_MAX_TURNS"], seen["PATH"]) == ("secret", "3", os.environ["PATH"])
    assert seen["HOME"] != os.environ["HOME"]
    assert not Path(seen["HOME"]).exists()
    assert len(seen["OPENAI_API_KEY"]) >= 32
    assert seen["OPENAI_API_KEY"] != seen["CUA_DEVICE_TOKEN"]


LOOK_UP = """
import os, pathlib
numbers = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
found = set()
for number in numbers:
    try:
        found.add("of-the-judge" in pathlib.Path(f"/proc/{number}/environ").read_text())
    except PermissionError:
        found.add("refused")
print(os.getuid(), len(numbers), found <= {"refused", False})
"""


async def test_an_agent_sees_no_process_but_its_own_and_reads_no_environment_above_it(bench: Bench) -> None:
    await bench.run_command(PYTHON, "-c", LOOK_UP)

    uid, num_others, is_closed = (bench.folder / "r1.log").read_text().split()
    assert (int(uid) in GUEST_UIDS) == can_change_user()
    assert int(num_others) <= 1 or not can_sandbox()  # the one that began it
    assert is_closed == "True"


needs_root = pytest.mark.skipif(not can_change_user(), reason="not root: only root gives agents users of their own")
LOOKS_AROUND = """
import os, pathlib, sys
print(os.getuid(), sys.prefix)
for name in sys.argv[1:]:
    path = pathlib.Path(sys.argv[0]).parent / name
    try:
        print(path.read_text() if path.is_file() else os.listdir(path))
    except OSError as error:
        print(type(error).__name__)
"""


@needs_root
async def test_an_interpreter_below_a_folder_of_roots_works_with_its_packages(bench: Bench, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    venv.create(closed / "venv", symlinks=True)
    (closed / "link").symlink_to("venv")
    closed.chmod(0o700)

    await bench.run_command(str(closed / "link/bin/python"), "-c", LOOKS_AROUND)

    uid, prefix = (bench.folder / "r1.log").read_text().split()
    assert (int(uid) in GUEST_UIDS, prefix) == (True, str(closed / "link"))


@needs_root
async def test_links_of_a_folder_of_roots_lead_on_to_others_in_it(bench: Bench, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "the program\nof ours").mkdir(parents=True)
    script = closed / "the program\nof ours" / "agent.py"
    script.write_text(LOOKS_AROUND)
    (closed / "a link").symlink_to(closed / "b link")
    (closed / "b link").symlink_to(script.parent)
    (closed / "agent.py").symlink_to(script)
    closed.chmod(0o700)

    for path in (closed / "a link" / "agent.py", closed / "agent.py"):
        await bench.run_command(PYTHON, str(path), "..")

    said = (bench.folder / "r1.log").read_text().splitlines()
    assert [int(line.split()[0]) in GUEST_UIDS for line in said[::2]] == [True, True]
    assert sorted(literal_eval(said[1])) == ["a link", "the program\nof ours"]


@needs_root
async def test_a_program_may_lie_in_a_current_folder_that_is_roots_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "agent.py").touch()
    monkeypatch.chdir(tmp_path)

    claim_guest_account((PYTHON, "agent.py"), "agent").release()


@needs_root
def test_a_program_that_the_agents_user_cannot_read_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.touch(mode=0o600)

    with pytest.raises(ConfigError, match=rf"other users can read.* got {script}; .*chmod o\+r"):
        claim_guest_account((PYTHON, str(script)), "agent")
    with pytest.raises(ConfigError, match="got /no/such/program;"):
        claim_guest_account(("/no/such/program",), "agent")
