"""Attacks of a grader's Python, and of answers, on the run that grades with them."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import psutil

from cua_rl.host.sandbox import can_sandbox
from cua_rl.judge.config import JudgeConfig
from cua_rl.judge.grader import MAX_ANSWER_BYTES, Grader
from cua_rl.judge.request import Case
from cua_rl.types.errors import JudgeError
from cua_rl.types.rollout import StopReason
from scripts.red_team.findings import Finding, Findings, Targets, check, check_cost
from scripts.red_team.floods import Cost, peak_bytes
from scripts.red_team.targets import ALL_CANARIES

ROW = 24
# what it finds out, it tells in an error, which is the reason of the verdict
SPY = """
import glob, os, socket

def grade(sample, item):
    texts = [repr(dict(os.environ))]
    for path in [*glob.glob("/proc/[0-9]*/environ"), *item["files"]]:
        try:
            texts.append(open(path, errors="replace").read())
        except OSError:
            pass
    found = {canary for canary in item["canaries"] for text in texts if canary in text}
    reached = []
    for family, address in ((socket.AF_INET, ("127.0.0.1", item["port"])), (socket.AF_UNIX, "\\0" + item["name"])):
        try:
            with socket.socket(family) as client:
                client.settimeout(2)
                client.connect(address)
            reached.append(str(address))
        except OSError:
            pass
    raise ValueError(f"seen={sorted(found)} reached={reached} processes={len(glob.glob('/proc/[0-9]*'))}")
"""
FLOODS = {
    "a report of 1 GB": "open(os.environ['GRADE_PATH'], 'w').truncate(2**30); os._exit(0)",
    "1 GB of output": "[os.write(1, b'a' * 2**20) for _ in range(1024)]; return 1",
    "memory without end": "return len([b'a' * 2**30 for _ in range(64)])",
    "a report with 100,000 brackets": "open(os.environ['GRADE_PATH'], 'w').write('[' * 100_000); os._exit(0)",
    "a link as a report": "os.symlink('/etc/passwd', os.environ['GRADE_PATH']); os._exit(0)",
}
LEAVES = """
import os, subprocess

def grade(sample, item):
    subprocess.Popen(["sleep", item["seconds"]], start_new_session=True, env={}, stdout=subprocess.DEVNULL)
    return 1
"""


def attack_grader(targets: Targets) -> Findings:
    """Row 24: a grader's Python reads keys, calls our processes, or exhausts the controller; an answer does."""
    ours, closed = targets.environment(), targets.folder / "grader"
    closed.mkdir(mode=0o700)
    (closed / ".env").write_text(f"KEY=canary-{ALL_CANARIES[0]}")
    with patch.dict(os.environ, ours), _listening() as (port, name):
        files = [str(closed / ".env"), f"/proc/{os.getpid()}/environ"]
        item = {"files": files, "canaries": list(ALL_CANARIES), "port": port, "name": name}
        said, _ = _grade(_python(SPY), "a", item)
    for part, attack in (("seen", "canaries that a grader's Python reads"), ("reached", "sockets that it connects to")):
        got = said.partition(f"{part}=")[2].partition("]")[0].strip("[") if part in said else f"broke off: {said}"
        if got and not can_sandbox():
            yield Finding(row=ROW, attack=attack, expected="", got=f"no namespaces: {got}", verdict="not promised")
        else:
            yield check(ROW, attack, "none", got or "none", not got)
    for attack, body in FLOODS.items():
        said, cost = _grade(_python(f"import os\n\ndef grade(sample, item):\n    {body}"), "a", {})
        yield check_cost(ROW, f"{attack}: {said[:60]}", cost)
    seconds = str(86_400 + os.getpid())
    _grade(_python(LEAVES), "a", {"seconds": seconds})
    left = [each.pid for each in psutil.process_iter(["cmdline"]) if seconds in (each.info["cmdline"] or [])]
    yield check(ROW, "processes that a grader leaves", "none", left or "none", not left)
    similar = {"type": "text_similarity", "name": "s", "input": "{{sample.output_text}}", "reference": "{{item.a}}"}
    for metric in ("fuzzy_match", "rouge_l", "gleu", "bleu"):
        for answer in ("ab" * (MAX_ANSWER_BYTES // 2), "a " * (MAX_ANSWER_BYTES // 2), "a" * 2**24):
            _, cost = _grade(similar | {"evaluation_metric": metric}, answer, {"a": answer[:MAX_ANSWER_BYTES][::-1]})
            yield check_cost(ROW, f"an answer of {len(answer):,} characters for {metric}", cost)


def _python(source: str) -> Mapping[str, Any]:
    return {"type": "python", "name": "attack", "source": source}


def _grade(grader: Mapping[str, Any], answer: str, item: Mapping[str, Any]) -> tuple[str, Cost]:
    """What the verdict, or the fault, says, and how long the event loop of whoever graded did nothing else."""

    async def judge() -> tuple[str, float]:
        case = Case(instruction="", turns=(), answer=answer, stop_reason=StopReason.FINISHED, item=item)
        longest = 0.0

        async def tick() -> None:
            nonlocal longest
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.1)
        try:
            judgement = await Grader(JudgeConfig(grader_text=json.dumps(grader)), None).judge(case, decides=True)
            said = f"grade {judgement.score:g} {judgement.reason}"
        except JudgeError as error:
            said = str(error)
        await asyncio.sleep(0.1)
        ticking.cancel()
        return said, longest

    before = peak_bytes(os.getpid())
    said, longest = asyncio.run(judge())
    return said, Cost(wait_s=longest, growth_bytes=peak_bytes(os.getpid()) - before)


@contextmanager
def _listening() -> Generator[tuple[int, str]]:
    """A port of the loopback interface and an abstract name at which something listens."""
    name = f"cua-grader-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as inet, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        yield inet.getsockname()[1], name
