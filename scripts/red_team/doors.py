"""Attacks on the addresses of gateway and monitor."""

import gzip
import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from cua_rl.database.session import make_writer_engine
from cua_rl.monitor.projects import create_project
from scripts.red_team.findings import (
    JSON,
    MAX_GROWTH_BYTES,
    MAX_WAIT_S,
    Finding,
    Findings,
    Targets,
    arrays,
    check,
    growth_bytes,
    mib,
)
from scripts.red_team.targets import WRITE_TOKEN, asked_meanwhile, listeners, status_of

_WRONG: tuple[Any, ...] = (True, -1.5, "no \x00 text", [], [[1, None]], {"a": {"b": [1]}}, 10**30)


def check_waits(row: int, attack: str, waits: list[float]) -> Finding:
    """Whether others waited longer for their answers than before the attack: a busy machine is slow by itself."""
    usual_s, worst_s = waits
    got = f"{worst_s:.2f} s, without it {usual_s:.2f} s"
    return check(row, f"{attack}: others wait", "< 0.5 s longer", got, worst_s - usual_s < MAX_WAIT_S)


def attack_gateway_bodies(targets: Targets) -> Findings:
    """Row 5: huge and deep bodies to a rollout that does not exist."""
    base, rollout, key = targets.run.gateway
    models = f"{base}/rollouts/{rollout}/v1/models"
    with asked_meanwhile(models, {"Authorization": f"Bearer {key}"}) as waits:
        growth, status = growth_bytes(
            targets.run.process.pid,
            lambda: status_of("POST", f"{base}/rollouts/unknown/v1/responses", content=arrays(120), headers=JSON),
        )
    yield check(5, "120 MB to an unknown rollout: memory", "< 150 MiB", mib(growth), growth < MAX_GROWTH_BYTES)
    yield check_waits(5, "120 MB to an unknown rollout", waits)
    yield check(5, "120 MB to an unknown rollout: answer", "no 5xx", status, status < 500)
    deep = "[" * 100_000 + "]" * 100_000
    headers = JSON | {"Authorization": f"Bearer {key}"}
    status = status_of("POST", f"{base}/rollouts/{rollout}/v1/responses", content=deep, headers=headers)
    yield check(5, "JSON of 100,000 levels", "no 5xx", status, status < 500)


def attack_gateway_address(targets: Targets) -> Findings:
    """Row 6: the address of a rollout without its key."""
    base, rollout, key = targets.run.gateway
    url, body = f"{base}/rollouts/{rollout}/v1/responses", json.dumps({"model": "base", "input": []})
    bearer = {"Authorization": f"Bearer {key}"}
    for attack, headers in (
        ("no bearer", JSON),
        ("a wrong bearer", JSON | {"Authorization": "Bearer wrong"}),
        ("text/plain", bearer | {"Content-Type": "text/plain"}),
        ("a foreign Host", JSON | bearer | {"Host": "evil.example"}),
    ):
        status = status_of("POST", url, content=body, headers=headers)
        yield check(6, f"POST to a rollout with {attack}", "refused", status, status in (401, 403, 415, 421))


def attack_monitor_bodies(targets: Targets) -> Findings:
    """Row 10: a large body without a token, and half-open connections."""
    base = targets.run.monitor
    port = int(base.rpartition(":")[2])
    (server, *_) = [process for _, each, process in listeners(targets.run.processes()) if each == port]
    with asked_meanwhile(f"{base}/api/runs", {}) as waits:
        growth, status = growth_bytes(
            server.pid, lambda: status_of("POST", f"{base}/api/ingest/batch", content=arrays(60), headers=JSON)
        )
    yield check(10, "60 MB without a token: memory", "< 150 MiB", mib(growth), growth < MAX_GROWTH_BYTES)
    yield check(10, "60 MB without a token: answer", "401, 413 or hung up", status, status in (0, 401, 403, 413))
    yield check_waits(10, "60 MB without a token", waits)
    with ExitStack() as stack:
        for _ in range(300):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            half.sendall(b"POST /api/ingest/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n[")
        with asked_meanwhile(f"{base}/api/runs", {}) as waits:
            time.sleep(3)
    yield check_waits(10, "300 half-open requests", waits)


def attack_ingest(targets: Targets) -> Findings:
    """Row 11: items whose fields have wrong types; they are refused, or their pages stay whole."""
    base, engine = targets.run.monitor, make_writer_engine(targets.run.database_url)
    try:
        _, token = create_project(engine, "red-team")
    finally:
        engine.dispose()
    headers = {"Authorization": f"Bearer {token}"}
    kinds = ("tasks", "environments", "steps", "evals", "rollouts", "turns", "actions", "validations")
    fields = ("client_id", "rollout_id", "step", "turn_index", "status", "task_id", "reward", "start_time", "cua_rl")
    worst = 0
    for kind in kinds:
        for value in _WRONG:
            item = dict.fromkeys(fields, value)
            body = {"training": {"run_name": "red", "cua_rl": value}, kind: [item]}
            worst = max(worst, status_of("POST", f"{base}/api/ingest/batch", json=body, headers=headers))
    yield check(11, "items with fields of wrong types", "no 5xx", worst, worst < 500)
    runs = [run["run_id"] for run in httpx.get(f"{base}/api/runs", trust_env=False, timeout=60).json()["items"]]
    pages = ("", "/rollouts", "/timeline", "/tasks", "/metrics", "/failures")
    broken = [page for run in runs for page in pages if status_of("GET", f"{base}/api/runs/{run}{page}") >= 500]
    yield check(11, "pages after them", "whole", broken or "whole", not broken)


def attack_session(targets: Targets) -> Findings:
    """Row 12: the cookie of a session."""
    answer = httpx.post(f"{targets.run.monitor}/api/session", json={"token": WRITE_TOKEN}, trust_env=False, timeout=60)
    cookie = answer.headers.get("set-cookie", "")
    is_whole = answer.is_success and bool(cookie)
    yield check(
        12, "the token itself in the cookie", "another value", cookie[:40], is_whole and WRITE_TOKEN not in cookie
    )
    marks = [mark for mark in ("HttpOnly", "SameSite=strict") if mark.lower() not in cookie.lower()]
    yield check(12, "marks of the cookie", "HttpOnly, SameSite=strict", marks or "both", is_whole and not marks)


def attack_image(targets: Targets) -> Findings:
    """Row 14: a doubly compressed image from an allowed host."""
    bomb = gzip.compress(gzip.compress(bytes(2**29)))

    class Bomb(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip, gzip")
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(bomb)

    base, rollout, key = targets.run.gateway
    with ThreadingHTTPServer(("127.0.0.1", 0), Bomb) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        part = {"type": "input_image", "image_url": f"http://127.0.0.1:{server.server_port}/a.png"}
        body = {"model": "base", "input": [{"role": "user", "content": [part]}]}
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{base}/rollouts/{rollout}/v1/responses"
        growth, status = growth_bytes(
            targets.run.process.pid, lambda: status_of("POST", url, json=body, headers=headers)
        )
        server.shutdown()
    is_held = growth < MAX_GROWTH_BYTES and 400 <= status < 500
    yield check(14, "an image of 512 MiB in 1 KiB", "4xx, < 150 MiB", f"{status}, {mib(growth)}", is_held)
