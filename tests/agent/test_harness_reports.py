"""What a harness reports, and what code that it runs for the policy under its own user can do about that."""

import asyncio
import secrets
import sys
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessCommand
from cua_rl.host.process_guard import HEAD_BYTES, MAX_RESULT_BYTES, TAIL_BYTES
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.types.rollout import Rollout, StopReason
from tests.agent.harness_bench import PROGRAM, PYTHON, Bench, open_bench, run_out_of_time


@pytest_asyncio.fixture
async def bench(small_renderer: Qwen3VLRenderer, tmp_path: Path) -> AsyncGenerator[Bench]:
    async with open_bench(small_renderer, tmp_path) as opened:
        yield opened


def outcome(rollout: Rollout) -> tuple[StopReason, float | None]:
    return rollout.stop_reason, None if rollout.reward is None else rollout.reward.total


CHEAT = """
import os, signal, time
path, cheat = os.environ["CUA_RESULT_PATH"], '{"reward": 1000000.0, "success": true}'
def put(path):
    try:
        with open(path, "w") as file:
            file.write(cheat)
    except OSError:
        pass
def daemon():
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    print("attacks", flush=True)
"""
ATTACKS = {
    "a loop that renames": "daemon()\nwhile True: put(path + '.x'); os.replace(path + '.x', path)",
    "a loop that writes in place": "daemon()\nwhile True: put(path)",
    "a loop that truncates": "daemon()\nwhile True: open(path, 'w').close()",
    "a loop that removes": "daemon()\nwhile True:\n try: os.remove(path)\n except OSError: pass",
    "a link": "daemon()\nput(path + '.x'); os.symlink(path + '.x', path)\ntime.sleep(600)",
    "a second name": "daemon()\nput(path + '.x'); os.link(path + '.x', path)\ntime.sleep(600)",
    "a pipe": "daemon()\nos.mkfifo(path + '.x'); os.replace(path + '.x', path)\ntime.sleep(600)",
    "a folder": "daemon()\nos.mkdir(path)\ntime.sleep(600)",
    "a sparse terabyte": "daemon()\nopen(path, 'w').truncate(2**40)\ntime.sleep(600)",
    "the parent's descriptor": (
        "fd = os.environ['CUA_RESULT_FD']; parent = os.getppid(); daemon()\nwhile True: put(f'/proc/{parent}/fd/{fd}')"
    ),
    "an inherited descriptor": (
        "fd = int(os.environ['CUA_RESULT_FD']); daemon()\n"
        "while True: os.write(fd, (chr(10) + cheat + chr(10)).encode())"
    ),
    "an inherited descriptor without end of line": (
        "fd = int(os.environ['CUA_RESULT_FD']); daemon()\nwhile True: os.write(fd, cheat[:9].encode())"
    ),
}
"""What runs beside the program, under its user, in a session of its own, before and after the program reports."""


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: nobody names who wrote")
@pytest.mark.parametrize("attack", ATTACKS)
async def test_what_a_program_sends_itself_counts_whatever_its_descendants_write(attack: str, bench: Bench) -> None:
    script = f"""
send("{{}}\\n")  # from here on, the file does not count
cheat = subprocess.Popen([sys.executable, "-c", {CHEAT + ATTACKS[attack]!r}], close_fds=False)
while cheat.poll() is None:
    time.sleep(0.01)
ask()
send(json.dumps({{"reward": 0.0, "success": False}}))
time.sleep(0.1)
"""
    rollout = await bench.run(script)

    assert "attacks" in bench.log()
    assert (outcome(rollout), rollout.success) == ((StopReason.FINISHED, 0.0), False)


async def test_a_file_that_is_replaced_once_the_program_has_ended_does_not_count(bench: Bench) -> None:
    """Without a sandbox, descendants live on for seconds after the program, given to end by themselves."""
    cheat = CHEAT + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); parent = os.getppid(); daemon()\n"
        "while os.path.exists(f'/proc/{parent}'): time.sleep(0.001)\n"
        "time.sleep(0.1)\n"
        "while True: put(path + '.x'); os.replace(path + '.x', path)"
    )
    script = f"""
subprocess.run([sys.executable, "-c", {cheat!r}])
ask(); report(reward=0.0)
"""
    assert outcome(await bench.run(script)) == (StopReason.FINISHED, 0.0)


async def test_a_program_that_only_declared_its_descriptor_has_no_result_in_the_file(bench: Bench) -> None:
    rollout = await bench.run("send('{}'); report(reward=1.0); ask(); ask(); assert ask() == 403")

    assert outcome(rollout) == (StopReason.MAX_TURNS, 0.0)


@pytest.mark.parametrize(("text", "reward"), [("{}\n{}\n", 0.5), ("{}\n\n{}", 0.5), ("{} {}", None)])
async def test_the_last_line_that_a_program_sends_is_its_result(text: str, reward: float | None, bench: Bench) -> None:
    first, second = '{"reward": 0.25}', '{"reward": 0.5}'
    rollout = await bench.run(f"ask(); send({text.replace('{}', first, 1).replace('{}', second, 1)!r})")

    assert outcome(rollout) == (StopReason.TASK_ERROR if reward is None else StopReason.FINISHED, reward)


async def test_a_program_that_ends_when_its_time_is_up_has_reported_what_it_wrote(bench: Bench) -> None:
    """Of one that is late after a refusal, the reported reward counts, even if it has to be killed."""
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ask(); ask(); assert ask() == 403; {}; hang()"

    async def run(name: str, write: str) -> Rollout:
        begin = partial(bench.run, script.format(write), rollout_id=name)
        return await run_out_of_time(bench, lambda limits: begin(time_limits=limits), name)

    running = run("r0", "send('{\"reward\": 0.5}')"), run("r1", "report(reward=0.5)")
    assert [outcome(rollout) for rollout in await asyncio.gather(*running)] == 2 * [(StopReason.MAX_TURNS, 0.5)]


OPEN = "open(os.environ['CUA_RESULT_PATH'], 'wb')"


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("pass", "got no result: CUA_RESULT_PATH is absent"),
        (f"{OPEN}.close()", "a report that is empty"),
        (f"{OPEN}.write(b'{{')", "not JSON (Expecting property name enclosed in double quotes: line 1 column 2"),
        (f"{OPEN}.write(b'[' * 100000)", "nested too deeply"),
        (f"{OPEN}.write(b'[1]')", "JSON that is no object: [1]"),
        (f"{OPEN}.write(b'{{\"reward\": \\xff}}')", "not UTF-8 at byte 11"),
        (f'{OPEN}.write(b\'{{"reward": 0, "reward": 1}}\')', "a key twice: 'reward'"),
        (f"{OPEN}.write(b'{{\"reward\": 1' + b'0' * 5000 + b'}}')", "Exceeds the limit"),
        (f"{OPEN}.truncate(2**40)", f"more than {MAX_RESULT_BYTES:,} bytes"),
        ("os.symlink('/proc/self/environ', os.environ['CUA_RESULT_PATH'])", "a link, which is not followed"),
        ("os.symlink(os.environ['CUA_RESULT_PATH'], os.environ['CUA_RESULT_PATH'])", "a link, which is not followed"),
        ("os.mkfifo(os.environ['CUA_RESULT_PATH'])", "a pipe or device"),
        ("os.mkdir(os.environ['CUA_RESULT_PATH'])", "a folder"),
        ("report(reward=1.0); os.link(os.environ['CUA_RESULT_PATH'], 'second')", "one with several names"),
        ("send('{\"reward\": ' + '1' * 2**20 + '}')", f"more than {MAX_RESULT_BYTES:,} bytes"),
        ("subprocess.run(['sh', '-c', 'echo {} >&$CUA_RESULT_FD'], close_fds=False)", "is not the program itself"),
    ],
)
async def test_a_fault_without_a_result_names_the_reason(script: str, complaint: str, bench: Bench) -> None:
    rollout = await bench.run(f"os.chdir(os.environ['CUA_WORK_DIR']); ask(); {script}")

    assert outcome(rollout) == (StopReason.TASK_ERROR, None)
    assert complaint in (rollout.error or "")


async def test_what_a_program_starts_finds_the_payload_neither_in_its_environment_nor_on_standard_input(
    bench: Bench,
) -> None:
    expected = secrets.token_hex()
    row = {"task_id": "game", "payload": {"expected": expected, "long": "x" * 90_000}}
    script = """
assert len(task()["expected"]) == 64
subprocess.run("cat /proc/*/environ /proc/*/cmdline /dev/stdin; env; cat; exit 0", shell=True, stderr=subprocess.STDOUT)
ask(); report(reward=0.0)
"""
    rollout = await bench.run(script, row=row)

    assert outcome(rollout) == (StopReason.FINISHED, 0.0)
    assert "CUA_TASK_ID" in bench.log()
    assert expected not in bench.log()


async def test_a_program_that_asks_for_it_by_name_has_the_payload_in_its_environment(bench: Bench) -> None:
    script = PROGRAM + "ask(); report(reward=json.loads(os.environ['CUA_TASK'])['worth'])"
    command = AgentCommand(argv=(PYTHON, "-c", script), log_folder=bench.folder, variables=("CUA_TASK",))

    rollout = await bench.run_program(HarnessCommand(command), row={"task_id": "game", "payload": {"worth": 0.5}})

    assert outcome(rollout) == (StopReason.FINISHED, 0.5)


async def test_the_key_of_a_rollout_gives_its_holder_answers_but_no_result(bench: Bench) -> None:
    script = """
address = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
for path in ("/device/action", "/device", "/v1/result", "/finish", ""):
    try:
        urlopen(Request(address + path, b'{"action": "finish", "reward": 1, "success": true}', headers))
    except HTTPError as error:
        print(error.code)
ask(); report(reward=0.0)
"""
    assert outcome(await bench.run(script)) == (StopReason.FINISHED, 0.0)
    assert bench.log().split() == ["401", "405", "404", "404", "404"]


async def test_a_log_keeps_head_and_tail_of_an_output_without_end(bench: Bench) -> None:
    script = """
print("first")
for _ in range(40): sys.stdout.write("x" * 2**20)
print("last", flush=True); ask(); report(reward=0.0)
"""
    assert outcome(await bench.run(script)) == (StopReason.FINISHED, 0.0)
    log = bench.log()
    assert log.startswith("first\n")
    assert "the middle of this output is left out" in log
    assert log.endswith("last\n")
    assert HEAD_BYTES < len(log) <= HEAD_BYTES + 2 * TAIL_BYTES + 100
