"""Send the monitor requests that its schema allows, and requests that it does not: none may make the server fail.

    python -m scripts.fuzz_monitor [--requests 2000] [--seed 0]

A monitor in a process of its own shows a made-up run. Requests come from schemathesis; ids in them are often those of
things that exist, so that more than the first check of a route is reached. Ends with status 1 if any answer is a server
error or shows a file of the system.
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as use_seed
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from cua_rl.database.session import make_writer_engine
from cua_rl.monitor.projects import create_project
from scripts.monitor_process import WRITE_TOKEN, monitor_process, scratch_postgres

ENDLESS = "/api/events"
_SYSTEM_FILE = "root:x:0:0"
_ODD_METHODS = ("PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "POST")


@dataclass(kw_only=True)
class Report:
    """What was answered; `failures` names the requests that made the server fail."""

    num_requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter[int])
    failures: list[str] = field(default_factory=list[str])

    def add(self, answer: httpx.Response, request: str) -> None:
        self.num_requests += 1
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 500 or _SYSTEM_FILE in answer.text:
            self.failures.append(f"{answer.status_code} for {request[:1000]}")


@dataclass(kw_only=True)
class Fuzzer:
    """Sends requests to a monitor; `known` are ids of things that it has, by the name of their parameter."""

    client: httpx.Client
    known: Mapping[str, Any]
    write_token: str
    project_token: str
    seed: int = 0
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, num_requests: int) -> Report:
        """Send about so many requests, the same number to each operation."""
        schema: Any = schemathesis.openapi.from_dict(self.client.get("/api/openapi.json").json())
        operations: list[Any] = [found.ok() for found in schema.get_all_operations()]
        operations = [operation for operation in operations if operation.path != ENDLESS]
        num_each = max(1, num_requests // (2 * len(operations)))
        for operation in operations:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                with suppress(Unsatisfiable):  # nothing about some operations can be wrong
                    self._send_many(operation, mode, num_each)
        while self.report.num_requests < num_requests:
            operation = self._random.choice(operations)
            self._send(self._random.choice(_ODD_METHODS), operation.path.format_map(_Anything(self.known)), {}, b"{}")
        return self.report

    def _send_many(self, operation: Any, mode: GenerationMode, num_cases: int) -> None:
        @use_seed(self.seed)
        @settings(
            max_examples=num_cases,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            case.path_parameters = self._with_known(case.path_parameters)
            case.query = self._with_known(case.query)
            case.body = self._with_known(case.body)
            sent = case.as_transport_kwargs(base_url=str(self.client.base_url))
            content = sent.get("data") if "json" not in sent else json.dumps(sent["json"]).encode()
            headers = {name: value for name, value in dict(sent.get("headers") or {}).items() if name != "User-Agent"}
            self._send(sent["method"], sent["url"], sent.get("params") or {}, content, headers)

        send()

    def _send(
        self, method: str, url: str, params: Mapping[str, Any], content: Any, headers: Mapping[str, str] | None = None
    ) -> None:
        token = self.project_token if "/ingest/" in url else self.write_token
        request = f"{method} {url} {params} {content!r}"
        try:
            built = self.client.build_request(method, url, params=params, content=content, headers=headers or {})
        except (ValueError, TypeError, httpx.InvalidURL):  # nothing that can be sent at all
            return
        built.headers["Authorization"] = f"Bearer {token}"
        built.headers.setdefault("Content-Type", "application/json")
        self.report.add(self.client.send(built), request)

    def _with_known(self, value: Any) -> Any:
        """Put ids of things that exist where ids belong, more often than not."""
        match value:
            case dict():
                fields = cast("dict[str, Any]", value)
                return {name: self._known_or(name, inner) for name, inner in fields.items()}
            case list():
                return [self._with_known(inner) for inner in cast("list[Any]", value)]
            case _:
                return value

    def _known_or(self, name: str, value: Any) -> Any:
        is_known = name in self.known and self._random.random() < 0.7
        return self.known[name] if is_known else self._with_known(value)


class _Anything(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return "x"


def find_known(client: httpx.Client, run_id: str, training_id: int) -> dict[str, Any]:
    """Ids of a run that the monitor shows, and of one that the project may write to."""
    (rollout, *_) = client.get(f"/api/runs/{run_id}/rollouts", params={"phase": "step"}).json()["items"]
    shown = client.get(f"/api/runs/{run_id}/rollouts/{rollout['rollout_id']}").json()
    return {
        "run_id": run_id,
        "training_id": training_id,
        "phase": "step",
        "step": rollout["step"],
        "turn_index": 0,
        "sha256": shown["turns"][0]["before"]["sha256"],
        **{name: rollout[name] for name in ("rollout_id", "group_id", "task_id")},
    }


async def _check(given_arguments: argparse.Namespace) -> int:
    async with scratch_postgres() as (url, folder):
        seeding = ["-m", "scripts.seed_monitor", url, "--rollouts=1", "--turns=2"]
        process = await asyncio.create_subprocess_exec(sys.executable, *seeding)
        if await process.wait():
            raise SystemExit("expected the run to be seeded, it was not")
        engine = make_writer_engine(url)
        _, token = create_project(engine, "fuzz")
        engine.dispose()
        async with monitor_process(url, folder) as monitor:
            report = await asyncio.to_thread(_fuzz, monitor.base_url, token, given_arguments)
            num_errors = monitor.owner.log_path.read_text().count("Traceback")
    figure = {"figure": "fuzz_monitor", "requests": report.num_requests, "failures": len(report.failures)}
    print("\n".join(report.failures[:20]))
    print(json.dumps(figure | {"statuses": dict(sorted(report.statuses.items())), "logged_errors": num_errors}))
    return 1 if report.failures else 0


def _fuzz(base_url: str, token: str, given_arguments: argparse.Namespace) -> Report:
    with httpx.Client(base_url=base_url, timeout=60, trust_env=False) as client:
        bearer = {"Authorization": f"Bearer {token}"}
        sent = client.post("/api/ingest/batch", json={"training": {"run_name": "fuzzed"}}, headers=bearer)
        known = find_known(client, "1", sent.json()["training_id"])
        fuzzer = Fuzzer(
            client=client, known=known, write_token=WRITE_TOKEN, project_token=token, seed=given_arguments.seed
        )
        return fuzzer.run(given_arguments.requests)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(_check(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
