"""Odd harness programs: each is a fault or has a reward, nothing of it is left, and the next rollout is a good one."""

import re
from pathlib import Path

import pytest

from cua_rl.environments.config import DeviceConfig
from cua_rl.host.scratch import scratch_folder
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rl.advantages import score_group
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.types.rollout import RolloutGroup, StopReason
from tests.agent.harness_bench import open_bench
from tests.agent.test_harness_faults import marked_processes

FAULTS = {
    "closes everything that it has open": "os.closerange(0, 256)",
    "leaves a pipe in the place of its result": "os.mkfifo(os.environ['CUA_RESULT_PATH'])",
    "leaves a device in the place of its result": "os.symlink('/dev/zero', os.environ['CUA_RESULT_PATH'])",
    "reports more than a result may have": "send(json.dumps({'reward': 1, 'answer': 'x' * 2**21}) + chr(10))",
    "reports a result nested without end": "send('{\"reward\":' + '[' * 90000 + ']' * 90000 + '}' + chr(10))",
    "reports two rewards": 'send(\'{"reward": 0, "reward": 1}\' + chr(10))',
    "reports a list": "send('[{\"reward\": 1}]' + chr(10))",
    "reports a fault of half a character": "report(reward=1, fault={'kind': ['a'], 'message': chr(0xd800) + chr(0)})",
    "becomes another program": "os.execv('/bin/true', ['true'])",
    "moves its folder away": "home = os.environ['CUA_WORK_DIR']; os.chdir('/'); os.rename(home, home + '.old')",
}
REWARDED = {
    "asks a hundred times at once": """
import threading
asked = [threading.Thread(target=ask) for _ in range(100)]
[one.start() for one in asked]; [one.join() for one in asked]
""",
    "leaves a hundred children": """
for _ in range(100):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
""",
    "leaves a tree deeper than any path": """
os.chdir(os.environ["CUA_WORK_DIR"])
for _ in range(3000):
    os.mkdir("d"); os.chdir("d")
os.chdir("/")
""",
    "leaves folders that nobody may read": """
os.chdir(os.environ["CUA_WORK_DIR"])
os.makedirs("a/b"); open("a/b/c", "w").close(); os.chmod("a/b", 0); os.chmod("a", 0)
""",
    "leaves names of any bytes": r"""
os.chdir(os.environ["CUA_WORK_DIR"])
open(b"\xff\n-rf *", "w").close(); os.symlink("/", "root")
""",
    "leaves half a request": r"""
import socket
_, _, place, path = os.environ["OPENAI_BASE_URL"].split("/", 3)
host, port = place.split(":")
head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {os.environ['OPENAI_API_KEY']}"
one = socket.create_connection((host, int(port)))
one.send(f"{head}\r\nContent-Length: 900\r\n\r\n".encode() + b"{")
""",
    "names metrics like ours": """
report(reward=0.25, metrics={"loss/total": 7, "": 1, "../a": 2, chr(0xd800): 3, "ok": float("nan"), "x" * 9999: 4})
""",
    "answers with half a character": "report(reward=0.25, answer=chr(0xd800) + chr(0))",
    "reports in two ways": "send(json.dumps({'reward': 0.25}) + chr(10)); report(reward=9)",
    "will not go": "signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(['sleep', '600'])",
}
"""What they do between an answer of the model and a report of 0.25."""
REPORT = "\nif not os.path.exists(os.environ['CUA_RESULT_PATH']): report(reward=0.25)\n"


@pytest.mark.parametrize("name", [*FAULTS, *REWARDED])
async def test_an_odd_program_is_a_fault_or_has_its_reward_and_leaves_nothing(
    name: str, small_renderer: Qwen3VLRenderer, tmp_path: Path
) -> None:
    before, running = set(scratch_folder().iterdir()), set(marked_processes())
    async with open_bench(small_renderer, tmp_path) as bench:
        script = FAULTS.get(name) or REWARDED[name] + REPORT
        rollout = await bench.run(f"ask()\n{script}", time_limits=DeviceConfig(task_timeout_s=120))
        assert bench.gateway._rollouts == {}
        good = await bench.run("ask(); report(reward=0.75)", rollout_id="r2")

    if name in FAULTS:
        assert (rollout.stop_reason, rollout.reward) == (StopReason.TASK_ERROR, None)
        assert rollout.error
    else:
        assert rollout.reward is not None, rollout.error
        assert rollout.reward.total == 0.25
    assert good.reward is not None
    assert good.reward.total == 0.75
    assert set(marked_processes()) <= running
    assert set(scratch_folder().iterdir()) == before
    if name in REWARDED:
        group = RolloutGroup(group_id="g", index=0, task_id="game", seed=5, rollouts=(rollout, good))
        assert score_group(group, "mean").advantages == (-0.25, 0.25)
        metrics = rollout_metrics([group])
        assert "loss/total" not in metrics
        assert all(re.fullmatch(r"[A-Za-z0-9_./-]{1,200}", metric) for metric in metrics)
