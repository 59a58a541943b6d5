"""Attacks on the addresses of gateway and monitor."""

import gzip
import json
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import psycopg

from cua_rl.database.session import make_writer_engine
from cua_rl.monitor.projects import create_project
from scripts.red_team.findings import Findings, Targets, check, check_cost
from scripts.red_team.floods import (
    HALF_A_HEAD,
    NOTHING,
    UNREAD_EVENTS,
    Cost,
    Server,
    cost_of,
    half_a_body,
    hold_connections,
    many_scans,
    pipeline_heads,
    upload,
)
from scripts.red_team.targets import WRITE_TOKEN, status_of

_WRONG: tuple[Any, ...] = (True, -1.5, "no \x00 text", [], [[1, None]], {"a": {"b": [1]}}, 10**30)
_JSON = {"Content-Type": "application/json"}
HOLD_S = 3.0
_QUERIES = (
    *("DELETE FROM rollouts", "WITH gone AS (DELETE FROM rollouts RETURNING id) SELECT * FROM gone"),
    *("SELECT 1; DROP TABLE turns", "SELECT 1) AS asked; DROP TABLE turns; --", "COPY rollouts TO PROGRAM 'true'"),
    *("SELECT token_sha256 FROM projects", "SELECT key_sha256 FROM tinker_keys", "SELECT rolpassword FROM pg_authid"),
    *("SELECT pg_read_file('/etc/passwd')", "SELECT pg_ls_dir('/')", "SELECT lo_import('/etc/passwd')"),
    *("SELECT * FROM dblink('', 'SELECT 1') AS t(a int)", "SET ROLE cua_rl", "SELECT current_setting('hba_file')"),
    *("SELECT set_config('role', 'cua_rl', false)", "SELECT set_config('statement_timeout', '0', false)"),
    *("SELECT pg_sleep(60)", "SELECT pg_advisory_lock(1)", "SELECT id FROM rollouts FOR UPDATE"),
    *("SELECT pg_terminate_backend(pid) FROM pg_stat_activity", "SELECT pg_notify('cua_rl', '{}')"),
    "SELECT query_to_xml('SELECT * FROM projects', true, true, '')",
    "SELECT " + ", ".join(["repeat('x', 700000000)"] * 5),
    "SELECT count(*) FROM generate_series(1, 100000000)",
    "SELECT count(*) FROM generate_series(1, 100000) AS a, generate_series(1, 1000000) AS b",
)


def gateway_of(targets: Targets) -> tuple[Server, str]:
    """The gateway and the path of a rollout's responses."""
    base, rollout, key = targets.run.gateway
    path = f"/rollouts/{rollout}/v1"
    pid = targets.run.process.pid
    return Server(base_url=base, pid=pid, others_ask=f"{path}/models", key=key), f"{path}/responses"


def monitor_of(targets: Targets) -> Server:
    """The run's monitor."""
    (monitor, *_) = targets.run.find("cua_rl.recipes.serve_monitor", "cua_rl.monitor")
    return Server(base_url=targets.run.monitor, pid=monitor.pid, others_ask="/api/runs")


def attack_gateway_bodies(targets: Targets) -> Findings:
    """Row 5: huge and deep bodies to a rollout that does not exist."""
    gateway, responses = gateway_of(targets)
    cost, status = cost_of(gateway, partial(upload, gateway, "/rollouts/unknown/v1/responses", 120))
    yield check_cost(5, "120 MB to an unknown rollout", cost)
    yield check(5, "120 MB to an unknown rollout: answer", "no 5xx", status, status < 500)
    deep = "[" * 100_000 + "]" * 100_000
    status = gateway.post(responses, content=deep, headers=_JSON | {"Authorization": f"Bearer {gateway.key}"})
    yield check(5, "JSON of 100,000 levels", "no 5xx", status, 400 <= status < 500)


def attack_gateway_texts(targets: Targets) -> Findings:
    """Row 17: an agent with a valid key sends one text that no context holds."""
    gateway, responses = gateway_of(targets)
    for num_mb in (1, 4, 120):
        cost, status = cost_of(gateway, partial(send_text, gateway, responses, num_mb))
        yield check_cost(17, f"a text of {num_mb} MB with a key", cost, num_mb)
        yield check(17, f"a text of {num_mb} MB with a key: answer", "4xx", status, 400 <= status < 500)
    for attack, cost, status in costs_of_requests(gateway, responses):
        yield check_cost(17, attack, cost, 100)
        yield check(17, f"{attack}: answer", "4xx", status, 400 <= status < 500)
    names = {"top_p\r\nX-Injected: 1": 1, "top_k": 1}
    body = {"model": "policy", "input": "a", "max_output_tokens": 1, **names}
    answer = httpx.post(
        gateway.base_url + responses, json=body, headers={"X-API-Key": gateway.key}, trust_env=False, timeout=300
    )
    got = (answer.status_code, answer.headers.get("CUA-Ignored"), answer.headers.get("X-Injected"))
    yield check(
        17, "a header in the name of a field", "(200, 'others, top_k', None)", got, got == (200, "others, top_k", None)
    )


def costs_of_requests(gateway: Server, responses: str) -> Iterator[tuple[str, Cost, int]]:
    """Requests with a key whose parts are small, but many, or dear; their costs, and the statuses of the answers."""
    messages = responses.replace("/responses", "/messages")
    block, picture = {"type": "text", "text": "a"}, b64encode(many_scans(20_000)).decode()
    source = {"type": "base64", "media_type": "image/jpeg", "data": picture}
    requests: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("a message of 300,000 blocks", messages, {"messages": [{"role": "user", "content": [block] * 300_000}]}),
        ("250,000 tools", messages, {"messages": [], "tools": [{"name": "a", "input_schema": {}}] * 250_000}),
        ("a system of 100 MB", messages, {"messages": [], "system": "word " * 20_000_000}),
        (
            "150,000 calls of a computer",
            responses,
            {"tools": [{"type": "computer"}], "input": [{"type": "computer_call", "action": {}}] * 150_000},
        ),
        (
            "a picture of 20,000 scans",
            messages,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
        ),
    )
    for attack, path, body in requests:
        send = partial(gateway.post, path, json={"model": "policy", **body}, headers={"X-API-Key": gateway.key})
        cost, status = cost_of(gateway, send)
        yield attack, cost, status


def send_text(gateway: Server, path: str, num_mb: int) -> int:
    """Ask about one text; the status of the answer."""
    body = {"model": "policy", "input": "word " * (num_mb * 200_000)}
    return gateway.post(path, json=body, headers={"Authorization": f"Bearer {gateway.key}"})


def attack_connections(targets: Targets) -> Findings:
    """Row 18: what peers without a key can send before anybody asks for one, and how many can wait."""
    gateway, responses = gateway_of(targets)
    for name, server, path in (("gateway", gateway, responses), ("monitor", monitor_of(targets), "/api/session")):
        for attack, cost in connection_costs(server, path):
            yield check_cost(18, f"{attack} to the {name}", cost)


def connection_costs(server: Server, path: str) -> Iterator[tuple[str, Cost]]:
    """Attacks on what a server does before it has read a request, and their costs."""
    many = {NOTHING: 300, HALF_A_HEAD: 300, half_a_body(path): 300, UNREAD_EVENTS: 100}
    held = partial(time.sleep, HOLD_S)
    yield "40 MB of heads ahead of answers", cost_of(server, partial(pipeline_heads, server.address, 40))[0]
    yield "1,500 idle connections", cost_of(server, partial(hold_connections, server.address, {NOTHING: 1500}, held))[0]
    yield "1,000 unfinished requests", cost_of(server, partial(hold_connections, server.address, many, held))[0]


def attack_gateway_address(targets: Targets) -> Findings:
    """Row 6: the address of a rollout without its key."""
    gateway, responses = gateway_of(targets)
    in_path = responses.replace("/v1/", f"/keys/{gateway.key}/v1/")
    bearer, body = {"Authorization": f"Bearer {gateway.key}"}, json.dumps({"model": "policy", "input": "a"})
    for attack, path, headers in (
        ("no bearer", responses, _JSON),
        ("a wrong bearer", responses, _JSON | {"Authorization": "Bearer wrong"}),
        ("text/plain, as a page of another site can", in_path, {"Content-Type": "text/plain"}),
        ("a foreign Host", responses, _JSON | bearer | {"Host": "evil.example"}),
    ):
        status = gateway.post(path, content=body, headers=headers)
        yield check(6, f"POST to a rollout with {attack}", "refused", status, status in (401, 403, 415, 421))


def attack_monitor_bodies(targets: Targets) -> Findings:
    """Row 10: a large body without a token."""
    monitor = monitor_of(targets)
    cost, status = cost_of(monitor, partial(upload, monitor, "/api/ingest/batch", 60))
    yield check_cost(10, "60 MB without a token", cost)
    yield check(10, "60 MB without a token: answer", "401, 413 or hung up", status, status in (0, 401, 403, 413))


def attack_queries(targets: Targets) -> Findings:
    """Row 25: queries in SQL that write, read keys, files or others' rows, wait, or take what the machine has."""
    base = targets.run.monitor
    with psycopg.connect(targets.run.database_url) as owner:
        (before,) = owner.execute("SELECT count(*) FROM rollouts").fetchone() or (0,)
        for sql in _QUERIES:
            status = status_of("POST", f"{base}/api/runs/1/sql", json={"sql": sql})
            yield check(25, sql, "422", status, status == 422)
        (after,) = owner.execute("SELECT count(*) FROM rollouts").fetchone() or (0,)
    yield check(25, "rollouts after them", "no fewer", f"{before} to {after}", after >= before)
    others = "SELECT count(*) FROM pg_stat_activity WHERE usename <> session_user AND query NOT LIKE '<insufficient%'"
    rows = httpx.post(f"{base}/api/runs/1/sql", json={"sql": others}, trust_env=False, timeout=60).json().get("rows")
    yield check(25, "queries of others that one sees", "none", rows, rows == [["0"]])


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
    pages = ["runs/{}", *(f"runs/{{}}/{name}" for name in ("rollouts", "timeline", "tasks", "metrics"))]
    pages += [f"rollouts{name}?run_id={{}}" for name in ("", "/summary", "/tokens", "/first_actions")]
    asked = [page.format(run) for run in runs for page in pages]
    broken = [page for page in asked if status_of("GET", f"{base}/api/{page}") != 200]
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

    gateway, responses = gateway_of(targets)
    with ThreadingHTTPServer(("127.0.0.1", 0), Bomb) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        part = {"type": "input_image", "image_url": f"http://127.0.0.1:{server.server_port}/a.png"}
        body = {"model": "base", "input": [{"role": "user", "content": [part]}]}
        headers = {"Authorization": f"Bearer {gateway.key}"}
        cost, status = cost_of(gateway, partial(gateway.post, responses, json=body, headers=headers))
        server.shutdown()
    yield check_cost(14, "an image of 512 MiB in 1 KiB", cost)
    yield check(14, "an image of 512 MiB in 1 KiB: answer", "4xx", status, 400 <= status < 500)
