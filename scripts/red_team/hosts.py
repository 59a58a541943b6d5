"""Attack what a run on several hosts listens on, as somebody on their network who knows no secret: as root,

    python -m scripts.red_team.hosts

This machine stands for the hosts of the run; the attacker is in a network namespace with a cable to it, and tries
every port on which the run listens there, in the protocols of all that could.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import httpx
import psutil

from cua_rl.host.processes import is_loopback
from scripts.red_team.__main__ import print_findings
from scripts.red_team.findings import Finding, check
from scripts.red_team.messages import send_frames
from scripts.red_team.targets import command_line, listeners
from scripts.second_host import SecondHost, second_host

ROW = 15
_START_S = 240.0
SECRETS = {
    "VLLM_API_KEY": "key-of-the-model-server",
    "MONITOR_READ_TOKEN": "token-to-read-the-monitor",
}
QUESTIONS = (
    *(
        ("GET", path)
        for path in ("/v1/models", "/health", "/metrics", "/openapi.json", "/cua_rl/adapters", "/api/runs")
    ),
    *(("POST", path) for path in ("/v1/load_lora_adapter", "/tokenize", "/v1/completions")),
    *(("POST", path) for path in ("/rollouts/1/v1/responses", "/api/session")),
    *(("POST", path) for path in ("/api/ingest/batch", "/api/runs/1/rollouts/1/overrides")),
    *(("PUT", path) for path in ("/cua_rl/adapters/policy-1/adapter_config.json",)),
)
OPEN_TO_ALL = "text/html"
"""The monitor's page, which asks to sign in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A part of a run on several hosts, with what it says when others can reach it."""

    name: str
    words: Sequence[str]
    secret: str
    says: str
    exposed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables with which it does not start without its secret."""

    def start(self, folder: Path, secrets: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start it in `folder`, where `NAME.out` gets its output."""
        clean = {name: value for name, value in os.environ.items() if name not in (*SECRETS, "DATABASE_URL")}
        with (folder / f"{self.name}.out").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", *self.words],
                cwd=folder,
                env=clean | dict(secrets) | {"PYTHONPATH": str(Path(__file__).parents[2])},
                stdout=output,
                stderr=output,
            )


def programs(host: SecondHost) -> Sequence[Program]:
    """A run whose model server, rollout worker and monitor could all be on other hosts."""
    here, recipes = host.our_address, "cua_rl.recipes"
    return (
        Program(
            name="model",
            words=(f"{recipes}.serve_model", f"host={here}", "port=8000", "lora_rank=16", "max_model_len=2048"),
            secret="VLLM_API_KEY",
            says=f"model server: http://{here}:8000, which asks for VLLM_API_KEY; nothing is encrypted",
        ),
        Program(
            name="monitor",
            words=(f"{recipes}.serve_monitor", f"host={here}", "port=8720"),
            secret="MONITOR_READ_TOKEN",
            says=f"other machines can connect to http://{here}:8720",
        ),
        Program(
            name="run",
            words=(
                *(f"{recipes}.train", f"base_url=http://{here}:8000"),
                *("rollout_workers=1", f"gateway.host={here}", "agent=external", "agent.command=sleep 900"),
                *("group_size=2", "groups_per_batch=1", "max_steps=1", "skip_baseline=true", "eval_tasks=none"),
                *("monitor=false", "log_path=run"),
            ),
            secret="RAY_AUTH_MODE",
            exposed={"RAY_ADDRESS": f"{here}:6379"},
            says="run run in ",
        ),
    )


def attack_without_secrets(started: Sequence[Program], folder: Path) -> Iterator[Finding]:
    """Nothing starts for other machines without its secret."""
    for program in started:
        others = {name: value for name, value in SECRETS.items() if name != program.secret}
        process = program.start(folder, {**others, **program.exposed})
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        process.kill()
        said = (folder / f"{program.name}.out").read_text(errors="replace")
        is_held = process.wait() == 2 and program.secret in said
        yield check(ROW, f"{program.name} without {program.secret}", "refused at the start", said, is_held)


def attack_ports(host: SecondHost, processes: Sequence[psutil.Process], folder: Path) -> Iterator[Finding]:
    """Whatever a neighbour can reach asks for a secret, and nothing that it sends is unpickled."""
    every = listeners(list(processes))
    owners = {str(port): command_line(each) for ip, port, each in every if not is_loopback(ip)}
    trap = folder / "unpickled"
    command = [*host.prefix, sys.executable, "-m", "scripts.red_team.hosts", host.our_address, str(trap), *owners]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300)
    for port, answers in json.loads(done.stdout).items():
        got = [f"{question}: {status}" for question, status in answers.items() if status < 400 or status >= 500]
        expected = "4xx to all" if answers else "no HTTP"
        yield check(
            ROW, f"{len(answers)} questions to {port}, {owners[port][-60:]}", expected, got or expected, not got
        )
    yield check(
        ROW, "a pickle to each open port", "not loaded", "loaded" if trap.exists() else "not loaded", not trap.exists()
    )
    wild = [port for ip, port, _ in listeners(list(processes)) if ip in ("0.0.0.0", "::")]
    yield check(ROW, "listeners on all addresses", "none", wild or "none", not wild)
    dead = [command_line(each) for each in processes if not each.is_running()]
    yield check(ROW, "processes that an attack has ended", "none", dead or "none", not dead)


def attack(host: SecondHost, folder: Path) -> Iterator[Finding]:
    """All attacks, before the run and while it goes on."""
    yield from attack_without_secrets(programs(host), folder)
    with ExitStack() as stack:
        for program in programs(host):
            if program.name == "run":
                _wait_until(lambda: _is_said(folder, "model", "model server: "), folder)
                yield from attack_ports(host, _ours(), folder)
            process = program.start(folder, SECRETS)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        _wait_until(lambda: any(command_line(each) == "sleep 900" for each in _ours()), folder)
        yield from attack_ports(host, _ours(), folder)
        for program in programs(host):
            is_said = _is_said(folder, program.name, program.says)
            yield check(
                ROW, f"what {program.name} says at its start", program.says, program.says if is_said else "", is_said
            )


def _ours() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _is_said(folder: Path, name: str, text: str) -> bool:
    return text in (folder / f"{name}.out").read_text(errors="replace")


def _wait_until(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            said = "\n".join(path.read_text(errors="replace")[-1500:] for path in folder.glob("*.out"))
            raise SystemExit(f"expected all programs to start, got:\n{said}")
        time.sleep(0.3)


def ask_ports(address: str, trap: str, *ports: str) -> dict[str, dict[str, int]]:
    """Statuses of the answers without a secret and with a wrong one, of each port that speaks HTTP."""
    answers: dict[str, dict[str, int]] = {}
    for port in ports:
        answers[port] = _ask(f"http://{address}:{port}")
        send_frames((address, int(port)), Path(trap))
    return answers


def _ask(url: str) -> dict[str, int]:
    """Statuses of the answers to all questions; pages are no answers. Another protocol answers none."""
    statuses: dict[str, int] = {}
    speaks_http = False
    for (method, path), key in product(QUESTIONS, (None, "wrong")):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            answer = httpx.request(method, url + path, json={}, headers=headers, timeout=5)
        except httpx.HTTPError:
            if not speaks_http:
                break
            continue
        speaks_http = True
        if OPEN_TO_ALL not in answer.headers.get("content-type", ""):
            statuses[f"{method} {path} with {key or 'no'} key"] = answer.status_code
    return statuses


def main(arguments: Sequence[str]) -> int:
    """Attack and report; 1 if anything got through. With an address, a path and ports, this is the attacker."""
    if arguments:
        print(json.dumps(ask_ports(*arguments)))
        return 0
    if os.geteuid() != 0:
        raise SystemExit("expected root, who can make network namespaces, got another user")
    folder = Path(tempfile.mkdtemp(prefix="cua_rl_hosts_"))
    folder.chmod(0o755)  # agents run as other users
    try:
        with second_host("cua_rl_attacker") as host:
            findings = list(attack(host, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_findings(findings)
    return int(any(each.verdict != "held" for each in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
