"""What is attacked: a run with agents that spy, two desktops, a browser and a site, and a Tinker service."""

import asyncio
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from cua_rl.database.postgres import running_postgres_url
from cua_rl.host.sandbox import can_sandbox
from cua_rl.types.errors import CuaError
from scripts.red_team.floods import peak_bytes
from scripts.red_team.shapes import encoded_texts, in_pieces, shaped_texts

START_TIMEOUT_S = 400.0
_ANSWER_TIMEOUT_S = 90.0
WRITE_TOKEN = "canary-write-token-of-the-monitor"
TINKER_KEY = "tml-canary-30-of-the-tinker-service"
_FAMILIES = ("VLLM", "XDG", "PYTHON", "LD", "LC", "HF_HUB", "CUA_RL", "NCCL", "CUDA", "TORCH")
"""Beginnings of names of which programs get some."""
CANARIES = {
    "SIGNING_KEY": "-----BEGIN A KEY-----\ncanary-16-line-of-several\n-----END A KEY-----",
    "OPENAI_API_KEY": "canary-01-openai",
    "HF_TOKEN": "canary-02-hugging-face",
    "WANDB_API_KEY": "canary-03-wandb",
    "AWS_SECRET_ACCESS_KEY": "canary-04-aws",
    "PGPASSWORD": "canary-05-postgres",
    "GITHUB_TOKEN": "canary-06-github",
    "JUDGE_API_KEY": "canary-07-judge",
    "HTTP_PROXY_AUTH": "Bearer canary-08-header",
    "SENTRY_DSN": "https://canary-09-user@127.0.0.1/1",
    "SOME_URL": "http://127.0.0.1/?token=canary-10-query",
    **{f"{family}_CANARY": f"canary-2{number}-family" for number, family in enumerate(_FAMILIES)},
    "MONITOR_WRITE_TOKEN": WRITE_TOKEN,
}
IN_CONFIGURATION = ("canary-11-argument", "canary-12-user", "canary-13-query", "canary-14-flag", "canary-15-header")
ALL_CANARIES = (
    *(
        value.rpartition("canary-")[2].splitlines()[0]
        for name, value in CANARIES.items()
        if name != "MONITOR_WRITE_TOKEN"
    ),
    *(value.removeprefix("canary-") for value in IN_CONFIGURATION),
)

# what a hostile agent does first: the first one writes down its environment and that of whoever started it, and waits;
# the others ask the model once, and end with an error that holds secrets
SPY = r"""
import json, os, sys, time, urllib.request
number = int(urllib.request.urlopen(NUMBERS, timeout=60).read())
if number:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "policy", "input": "a", "max_output_tokens": 1}).encode()
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/responses", body, headers)
    urllib.request.urlopen(asked, timeout=300).read()
    pieces = PIECES
    print(pieces[(number - 1) % len(pieces)])
    sys.exit(STATUS)
told = {}
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        told[pid] = open(f"/proc/{pid}/environ", "rb").read().decode(errors="replace")
    except OSError as error:
        told[pid] = type(error).__name__
beside = (".env", ".git/config", "run/config.json")
found = [path for path in beside if os.access(os.path.join(sys.path[0], path), os.R_OK)]
print(json.dumps({"environment": dict(os.environ), "seen": told, "pid": str(os.getpid()), "beside": found}), flush=True)
time.sleep(7200)
"""


_STATUS = 99
SAID = f"agent ended with status {_STATUS}"
"""The beginning of the error of an agent that has printed its secrets, instead of failing before."""


class Numbers:
    """Gives every agent that asks the next number."""

    def __init__(self) -> None:
        numbers = count()

        class Next(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(str(next(numbers)).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Next)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class LiveRun:
    """A training run in `folder / "closed" / "project" / "run"`, one of whose agents waits forever."""

    folder: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] = field(init=False)
    numbers: Numbers = field(init=False)
    spied: dict[str, Any] = field(init=False)
    texts: dict[str, str] = field(init=False)
    """What the other agents print: texts with secrets, by a part that nobody may see."""
    pieces: list[str] = field(init=False)

    @property
    def project(self) -> Path:
        """The folder of the agent's program, below one that only the user of the run enters, if sandboxes show it."""
        return self.folder / "closed" / "project"

    @property
    def run_folder(self) -> Path:
        return self.project / "run"

    @property
    def temporary(self) -> Path:
        """TMPDIR of the run."""
        return self.folder / "tmp"

    def start(self) -> None:
        """Start it, and wait for its first agent."""
        self.temporary.mkdir()
        self.temporary.chmod(0o1777)
        self.project.parent.mkdir(mode=0o700 if can_sandbox() else 0o755)
        self.project.mkdir()
        (self.project / ".git").mkdir()
        for name in (".env", ".git/config"):
            (self.project / name).write_text("of the project")
        self.numbers = Numbers()
        shaped = shaped_texts()
        self.texts = shaped | encoded_texts({name: CANARIES[name] for name in ("HF_TOKEN", "SIGNING_KEY")})
        self.pieces = in_pieces(self.texts)
        spy = self.project / "spy.py"
        values = {"NUMBERS": self.numbers.url, "PIECES": self.pieces, "STATUS": _STATUS}
        spy.write_text(re.sub("|".join(values), lambda name: repr(values[name[0]]), SPY))
        # in quotes within quotes, and with the zeros of an environment, no command line can be written
        words = [text for text in shaped.values() if not {"'", "\0"} & set(text)]
        python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable  # one that every user can run
        (self.project / "run.yaml").write_text(
            json.dumps(
                {
                    "agent.name": "external",
                    "agent.command": f"{python} {spy} --token canary-14-flag "
                    "--header 'Authorization: Bearer canary-15-header' "
                    f"http://canary-12-user:x@127.0.0.1:9/v1?api_key=canary-13-query {shlex.join(words)}",
                }
            )
        )
        options = (
            *("group_size=2", f"groups_per_batch={len(self.pieces)}", "max_steps=1", "skip_baseline=true"),
            *("eval_tasks=none", "trainer.num_processes=2", "gateway.allowed_media_domains=127.0.0.1"),
            "gbox_api_key=canary-11-argument",
        )
        with (self.folder / "run.out").open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cua_rl.recipes.train", f"log_path={self.run_folder}"),
                    *("--config", str(self.project / "run.yaml"), *options),
                ],
                env={**self.environment, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        logs = self.run_folder / "logs" / "agents"
        said: list[str] = []
        self.wait_for(lambda: said.extend(_lines(logs, '{"environment"')) or said)
        self.spied = json.loads(said[0])
        # every piece twice: the group of the one that waits has no end
        self.wait_for(lambda: self.log().count(SAID) >= 2 * len(self.pieces) - 1)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Poll until `condition` holds; the run must not end before."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"expected the run to start its agents, got:\n{self.output()}")
            time.sleep(0.3)

    def log(self) -> str:
        path = self.run_folder / "logs" / "run.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def output(self) -> str:
        return (self.folder / "run.out").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All that the run owns, the controller first."""
        controller = psutil.Process(self.process.pid)
        return [controller, *controller.children(recursive=True)]

    def guarded(self) -> list[psutil.Process]:
        """All guards of the run and what they watch, except the monitor, which gets secrets of its own."""
        found: list[psutil.Process] = []
        for process in self.processes():
            with suppress(psutil.Error):  # it has ended
                above = " ".join(command_line(each) for each in (process, *process.parents()))
                if "process_guard" in above and "serve_monitor" not in above:
                    found.append(process)
        return found

    def find(self, *words: str) -> list[psutil.Process]:
        """Processes of the run with one of the words in their command line, guards excepted."""
        found: list[psutil.Process] = []
        for process in self.processes():
            line = command_line(process)
            if any(word in line for word in words) and "process_guard" not in line:
                found.append(process)
        return found

    @property
    def database_url(self) -> str:
        url = running_postgres_url(self.run_folder / "postgres")
        assert url is not None, "the run has a database of its own"
        return url

    @property
    def gateway(self) -> tuple[str, str, str]:
        """Address of the gateway, id of a rollout, and its key."""
        variables = self.spied["environment"]
        parts = urlsplit(str(variables["OPENAI_BASE_URL"]))
        return f"http://{parts.netloc}", parts.path.split("/")[2], variables.get("OPENAI_API_KEY", "")

    @property
    def monitor(self) -> str:
        """Address of the run's monitor."""
        (line,) = [line for line in self.output().splitlines() if line.startswith("monitor at ")]
        return line.removeprefix("monitor at ").strip()

    def stop(self) -> None:
        """End it in order."""
        self.numbers.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=120)


@dataclass
class TinkerProcess:
    """A Tinker service on the included model, in `folder / "tinker"`, with two keys."""

    folder: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] = field(init=False)
    address: str = field(init=False)
    other_key: str = field(init=False)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = ("port=0", f"log_path={self.folder / 'tinker'}", "new_key=second", "server.max_model_len=2048")
        with (self.folder / "tinker.out").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cua_rl.recipes.serve_tinker", *settings],
                env={**self.environment, "TINKER_API_KEY": TINKER_KEY},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(r"TINKER_BASE_URL=(\S+)\nTINKER_API_KEY=(\S+)\n", self.output())) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise CuaError(f"expected a Tinker service, got:\n{self.output()[-2000:]}")
            time.sleep(0.3)
        self.address, self.other_key = found[1], found[2]

    def output(self) -> str:
        return (self.folder / "tinker.out").read_text(errors="replace")

    def ask(self, path: str, body: object = None, key: str = TINKER_KEY, method: str = "POST") -> httpx.Response:
        """An answer to JSON."""
        url, headers = f"{self.address}/api/v1/{path}", {"X-API-Key": key}
        return httpx.request(method, url, json=body, headers=headers, trust_env=False, timeout=120)

    def stop(self) -> None:
        """End it in order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=120)


def _lines(logs: Path, beginning: str) -> list[str]:
    lines = (line for log in logs.glob("*.log") for line in log.read_text(errors="replace").splitlines())
    return [line for line in lines if line.startswith(beginning)]


def command_line(process: psutil.Process) -> str:
    """Its arguments, "" if it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def listeners(processes: list[psutil.Process]) -> list[tuple[str, int, psutil.Process]]:
    """TCP addresses on which processes listen."""
    found: list[tuple[str, int, psutil.Process]] = []
    for process in processes:
        try:
            open_ones = [each for each in process.net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN]
            found += [(each.laddr.ip, each.laddr.port, process) for each in open_ones if each.laddr]
        except psutil.Error:
            continue
    return found


def status_of(method: str, url: str, **given: Any) -> int:
    """The status of an answer."""
    return httpx.request(method, url, trust_env=False, timeout=60, **given).status_code


class Devices:
    """Two desktops, a browser and a site in a process of their own, which does what it is told line by line."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        site = shutil.copytree(Path(__file__).parents[2] / "examples" / "sites" / "shopping_list", folder / "site")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.red_team.targets", str(site)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "devices.out").open("wb"),
            text=True,
        )
        self.log = folder / "devices.out"
        self.facts = self._answer()

    def tell(self, **order: Any) -> dict[str, Any]:
        """`shell` or `query` on desktop `number`; the answer has `text`, `seconds` and `peak_bytes`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], _ANSWER_TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise CuaError(
                f"expected an answer of the devices in {_ANSWER_TIMEOUT_S:.0f} s, got none; their log ends:\n"
                f"{self.log.read_text()[-800:]}"
            )
        return json.loads(line)

    def stop(self) -> None:
        """End them; an attack may have left them unable to end by themselves, but not their guards."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


async def _serve_devices() -> None:
    """Open the devices and a site, and obey, until standard input ends."""
    from cua_rl.environments.browser.page import as_page
    from cua_rl.environments.browser.page_tasks import PAGE_BROWSER, UserPages
    from cua_rl.environments.browser.served_site import ServedSite
    from cua_rl.environments.desktop.desktops import LinuxDesktops
    from cua_rl.environments.desktop.templates import DESKTOP_TASKS
    from cua_rl.environments.table import parse_sources
    from cua_rl.host.system import refuse_inspection
    from cua_rl.task_loader import load_tasks
    from cua_rl.tasks.readiness import prepare

    refuse_inspection()
    request = DESKTOP_TASKS[0].make_task(0).device_request()
    command = f"{shutil.which('python3', path='/usr/bin:/bin') or sys.executable} server.py --port {{port}}"
    source = {"source_type": "page", "file_path": sys.argv[1], "site_command": command, "reset": "POST /api/reset"}
    site_task = load_tasks(source, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with LinuxDesktops() as backend, UserPages(parse_sources(source)) as pages:
        desktops: list[Any] = [await backend.make(request) for _ in range(2)]
        page = as_page(await pages.make(site_task.device_request()))
        await prepare(site_task, page)
        assert isinstance(page.site, ServedSite)
        facts = {
            "desktops": [{"home": str(each.home), "display": each.display} for each in desktops],
            "site_port": page.site.port,
            "has_own_network": bool(page.site.servers.network.inside),
        }
        print(json.dumps(facts), flush=True)
        # not in a thread: attacks on files take all that there are
        orders = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        while line := await orders.readline():
            order, began = json.loads(line), time.monotonic()
            try:
                async with asyncio.timeout(20):
                    text = await _obey(desktops[order["number"]], order)
            except (CuaError, TimeoutError) as error:
                text = f"{type(error).__name__}: {error}"
            peak = peak_bytes(os.getpid())
            print(json.dumps({"text": text[:500], "seconds": time.monotonic() - began, "peak_bytes": peak}), flush=True)
        for device in (page, *desktops):
            await device.close()


async def _obey(desktop: Any, order: dict[str, Any]) -> str:
    if "shell" in order:
        return await desktop.shell(order["shell"])
    texts = await asyncio.gather(*(desktop.query(order["query"]) for _ in range(order.get("times", 1))))
    return str(max(texts, key=len))


if __name__ == "__main__":
    asyncio.run(_serve_devices())
