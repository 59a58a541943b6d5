"""People's own queries in SQL against a real embedded Postgres, tried as an attacker would."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import pytest_asyncio
from sqlalchemy import make_url

from cua_rl.database.migrations import migrate
from cua_rl.database.models import Base
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import make_writer_engine
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, open_database
from cua_rl.monitor.projects import create_project
from cua_rl.monitor.security import AccessRules
from cua_rl.monitor.sql_queries import SqlError, answer, list_tables, open_reader
from tests.patience import patience
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, start
from tests.real.monitor.conftest import WRITE_TOKEN, Monitor, serving
from tests.real.monitor.events import make_step_events

pytestmark = pytest.mark.asyncio(loop_scope="session")
FOREVER = "SELECT count(*) FROM generate_series(1, 100000) AS a, generate_series(1, 1000000) AS b"
REFUSED = {
    "INSERT INTO trainings (run_name) VALUES ('mine') RETURNING id": "only reads",
    "UPDATE rollouts SET success = true": "returns none",
    "WITH gone AS (DELETE FROM rollouts RETURNING id) SELECT * FROM gone": "only reads",
    "SELECT id FROM trainings FOR UPDATE": "only reads",
    "CREATE TEMPORARY TABLE mine AS SELECT 1": "syntax error",
    "SELECT 1 INTO mine": "returns none",
    "SELECT 1; DROP TABLE turns": "one statement",
    "SELECT 1) AS asked; DROP TABLE turns; --": "syntax error",
    "SELECT 'a') AS q UNION ALL SELECT * FROM (SELECT repeat('x', 1000000000)": "syntax error",
    "COPY rollouts TO PROGRAM 'id'": "syntax error",
    "SELECT pg_read_file('/etc/passwd')": "permission denied for function pg_read_file",
    "SELECT pg_ls_dir('.')": "permission denied for function pg_ls_dir",
    "SELECT lo_import('/etc/passwd')": "permission denied for function lo_import",
    "SELECT lo_from_bytea(0, 'x')": "permission denied for function lo_from_bytea",
    "SELECT * FROM dblink('', 'SELECT 1') AS t(a int)": "does not exist",
    "SET ROLE cua_rl": "syntax error",
    "SELECT set_config('role', 'cua_rl', false)": "permission denied for function set_config",
    "SELECT set_config('transaction_read_only', 'off', false)": "permission denied for function set_config",
    "SELECT set_config('statement_timeout', '0', false)": "permission denied for function set_config",
    "SELECT token_sha256 FROM projects": "permission denied for table projects",
    "SELECT payload FROM ingest_items": "permission denied for table ingest_items",
    "SELECT * FROM tinker_keys": "permission denied for table tinker_keys",
    "SELECT body FROM tinker_requests": "permission denied for table tinker_requests",
    "SELECT query_to_xml('SELECT * FROM projects', true, true, '')": "permission denied for function query_to_xml",
    "SELECT * FROM ts_stat('SELECT token_sha256::tsvector FROM projects')": "permission denied for function ts_stat",
    "SELECT public.cua_rl_ask('SELECT ARRAY[token_sha256] FROM projects')": "permission denied for table projects",
    "SELECT public.cua_rl_ask('SET statement_timeout = 0')": "only reads",
    "SELECT data FROM screenshots": "permission denied for table screenshots",
    "SELECT rolpassword FROM pg_authid": "permission denied for table pg_authid",
    "SELECT * FROM pg_hba_file_rules": "permission denied",
    "SELECT current_setting('data_directory')": "permission denied",
    "SELECT pg_sleep(60)": "permission denied for function pg_sleep",
    "SELECT pg_advisory_lock(7423001)": "permission denied for function pg_advisory_lock",
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity": "permission denied for function pg_terminate_backend",
    "SELECT pg_notify('cua_rl', '{}')": "permission denied for function pg_notify",
    "SELECT nextval('trainings_id_seq')": "permission denied for function nextval",
    "LOCK TABLE turns": "syntax error",
    "DO $$ BEGIN PERFORM 1; END $$": "syntax error",
    "EXPLAIN ANALYZE SELECT 1": "syntax error",
    "SELECT FROM rollouts": "returns none",
    "SELECT repeat('x', 10000000)::int": "invalid input syntax",
    "SELECT (repeat('x', 1000000) || n)::int FROM generate_series(1, 3) AS n": "invalid input syntax",
    "SELECT count(v) FROM (SELECT repeat('x', 100000) AS v FROM generate_series(1, 9000) AS n ORDER BY n DESC) t": (
        "temp_file_limit"
    ),
    "SELECT $1::text": "parameter",
    "SELECT (": "syntax error",
    "SELECT 1\nFROM rollouts\nWHERE nothing = 1": "(line 3)",
    "\n\nSELECT nothing": "(line 3)",
    "SELECT 1; -- one\nSELECT 2": "one statement",
    "SELECT 1; /* unfinished": "unterminated /* comment",
    "-- nothing": "syntax error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A database with a run of two steps, and the page that takes queries about it."""

    url: str
    reader: str
    log: Path
    client: httpx.AsyncClient

    async def ask(self, sql: str) -> httpx.Response:
        return await self.client.post("/api/runs/1/sql", json={"sql": sql})

    async def rows(self, sql: str) -> list[Any]:
        response = await self.ask(sql)
        assert response.status_code == 200, response.text
        return response.json()["rows"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def asked(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Asked]:
    folder = tmp_path_factory.mktemp("sql")
    async with EmbeddedPostgres(folder / "data", folder / "log") as postgres:
        await migrate(postgres.url)
        async with DatabaseRecorder(postgres.url, image_token_id=IMAGE_TOKEN) as recorder:
            for event in [start(), *make_step_events(1), *make_step_events(2)]:
                await recorder.record(event)
            await recorder.flush()
        engine = make_writer_engine(postgres.url)
        create_project(engine, "of somebody else")
        engine.dispose()
        database = open_database(postgres.url)
        reader = await open_reader(database)
        await database.engine.dispose()
        headers = {"Authorization": f"Bearer {WRITE_TOKEN}"}
        async with (
            serving(postgres.url) as port,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", headers=headers, trust_env=False, timeout=patience(60)
            ) as client,
        ):
            yield Asked(url=postgres.url, reader=reader, log=folder / "log", client=client)


@pytest.mark.parametrize("sql", REFUSED)
async def test_a_query_that_does_more_than_read_what_it_may_is_refused_with_the_reason(asked: Asked, sql: str) -> None:
    before = run_sql(asked.url, "SELECT count(*), sum(xmin::text::bigint) FROM rollouts")

    response = await asked.ask(sql)

    assert (response.status_code, REFUSED[sql] in response.text) == (422, True), response.text
    assert len(response.content) < 1000
    assert run_sql(asked.url, "SELECT count(*), sum(xmin::text::bigint) FROM rollouts") == before
    assert await asked.rows("SELECT count(*) FROM trainings") == [["1"]]  # and the server goes on


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("SELECT 1;", "1"),
        ("SELECT 1; -- of mine", "1"),
        ("SELECT 1 /* a; b */ ; ;\n/* one\n two */ -- three\n", "1"),
        ("SELECT 'x; -- y'", "x; -- y"),
        ("SELECT '/* it''s; */'; --", "/* it's; */"),
        ("SELECT E'it\\'s; -- y'; -- E", "it's; -- y"),
        ("SELECT $a$'; -- $$ y$a$;", "'; -- $$ y"),
        ("SELECT n AS \"a; -- b\" FROM (VALUES ('c')) AS t(n);", "c"),
    ],
)
async def test_what_follows_the_semicolon_of_a_query_may_be_a_comment(asked: Asked, sql: str, value: str) -> None:
    assert await asked.rows(sql) == [[value]]


async def test_a_query_leaves_nothing_to_the_next_and_sees_nothing_of_others(asked: Asked) -> None:
    (roles,) = await asked.rows("SELECT session_user, current_user, current_setting('transaction_read_only')")
    assert roles == ["cua_rl_reader", "cua_rl_reader", "on"]
    others = "SELECT count(*) FROM pg_stat_activity WHERE query NOT LIKE '<insufficient%' AND usename <> session_user"
    assert await asked.rows(others) == [["0"]]
    assert await asked.rows("SELECT count(*) FROM pg_stats WHERE tablename IN ('projects', 'tinker_keys')") == [["0"]]
    changing = (
        "SELECT proname FROM pg_proc WHERE provolatile = 'v' AND proname <> 'random' "
        "AND prorettype <> 'trigger'::regtype AND has_function_privilege(oid, 'EXECUTE')"
    )
    assert await asked.rows(changing) == []
    assert run_sql(asked.url, "SELECT pg_sleep(0), set_config('work_mem', '4MB', true)")  # the run itself may
    granted = await asked.rows("SELECT table_name, privilege_type FROM information_schema.role_table_grants")
    assert {privilege for _, privilege in granted} == {"SELECT"}


async def test_every_table_is_either_shown_or_held_back_on_purpose(asked: Asked) -> None:
    held_back = {"projects", "project_runs", "ingest_items"}
    held_back |= {f"tinker_{name}" for name in ("keys", "sessions", "models", "requests", "checkpoints", "samplers")}
    assert set(Base.metadata.tables) - {table.name for table in list_tables()} == held_back
    for table in list_tables():
        columns = ", ".join(column.name for column in table.columns)
        await asked.rows(f"SELECT {columns} FROM {table.name}")


async def test_long_lists_and_long_values_are_cut_and_said_to_be(asked: Asked) -> None:
    many = (await asked.ask("SELECT n FROM generate_series(1, 1001) AS n")).json()
    assert (len(many["rows"]), many["cut"]) == (1000, "rows")
    exact = (await asked.ask("SELECT n FROM generate_series(1, 1000) AS n;")).json()
    assert (len(exact["rows"]), exact["cut"]) == (1000, None)
    wide = await asked.ask("SELECT repeat('é', 3000) FROM generate_series(1, 1000)")
    assert (len(wide.json()["rows"]), wide.json()["cut"]) == (349, "size")  # 349 * 3000 <= 2**20 < 350 * 3000
    (long,) = await asked.rows("SELECT repeat('x', 1000000), NULL")
    assert long == ["x" * 4000 + "…", None]


async def test_values_are_as_postgres_writes_them_in_order_and_under_their_names(asked: Asked) -> None:
    sql = "SELECT n AS \"a b\", 'x' AS \"a b\", 9007199254740993, 'NaN'::float8, true, ARRAY[1], '{\"a\": 1}'::jsonb"
    found = (await asked.ask(f"{sql} FROM (VALUES (2), (1)) AS given(n) ORDER BY n")).json()
    assert [row[0] for row in found["rows"]] == ["1", "2"]
    assert found["rows"][0][1:] == ["x", "9007199254740993", "NaN", "true", "{1}", '{"a": 1}']
    assert [column["name"] for column in found["columns"]][:2] == ["a b", "a b"]
    assert [column["is_number"] for column in found["columns"]] == [True, False, True, True, False, False, False]


async def test_saved_queries_say_what_the_tables_say(asked: Asked) -> None:
    saved = {one["name"]: one["sql"] for one in (await asked.client.get("/api/runs/1/sql")).json()["saved"]}
    answers = {name: await asked.rows(sql) for name, sql in saved.items()}
    rollouts = run_sql(asked.url, "SELECT rollout_id FROM rollouts WHERE max_gap IS NOT NULL ORDER BY max_gap DESC")
    gaps = answers["Largest gaps between sampler and trainer"]
    assert {row[0] for row in gaps} == {row[0] for row in rollouts} != set()
    per_step = {
        str(step): (str(tokens), str(won))
        for step, tokens, won in run_sql(
            asked.url,
            "SELECT step, sum(cardinality(sampled_tokens)), count(DISTINCT rollouts.id) FILTER (WHERE success) "
            "FROM turns JOIN rollouts ON rollouts.id = rollout_pk JOIN groups ON groups.id = group_pk "
            "JOIN steps ON steps.id = step_id WHERE rollouts.status = 'completed' GROUP BY step",
        )
    }
    assert {row[0]: (row[2], row[3]) for row in answers["Sampled tokens per success"]} == per_step
    done = run_sql(asked.url, "SELECT count(*) FROM rollouts WHERE status = 'completed'")[0][0]
    for name, column in (("Success per task and step", 3), ("Turns until a success", 1)):
        assert sum(int(row[column]) for row in answers[name]) == done, name
    assert answers["Slowest devices"]


async def test_a_query_that_takes_too_long_is_stopped(asked: Asked) -> None:
    with pytest.raises(SqlError, match="the query was stopped"):
        await answer(asked.reader, FOREVER, time_limit_s=0.2)
    await _wait_for_queries(asked, 0)


async def test_cancelling_an_answer_ends_its_query_in_the_server(asked: Asked) -> None:
    answering = asyncio.create_task(answer(asked.reader, FOREVER, time_limit_s=3600))
    await _wait_for_queries(asked, 1)

    answering.cancel()

    await asyncio.wait([answering])
    assert answering.cancelled()
    await _wait_for_queries(asked, 0)


async def test_a_client_that_goes_away_ends_its_query(asked: Asked) -> None:
    rules = AccessRules(write_token=WRITE_TOKEN)
    app = make_app(Databases([open_database(asked.url)]), rules)
    gone, sent = asyncio.Event(), asyncio.Queue[Any]()
    body = [{"type": "http.request", "body": json.dumps({"sql": FOREVER}).encode()}]

    async def receive() -> dict[str, object]:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/api/runs/1/sql", "headers": headers}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "server": ("localhost", 80), "scheme": "http"}
    async with app.router.lifespan_context(app):
        handling = asyncio.create_task(guard(app, rules)(scope, receive, sent.put))
        await _wait_for_queries(asked, 1)
        gone.set()
        await handling
    assert (await sent.get())["status"] == 499  # not 422, as after the time limit
    await _wait_for_queries(asked, 0)


async def test_each_connection_has_two_gibibytes_of_memory(asked: Asked) -> None:
    with psycopg.connect(asked.reader) as connection:
        limits = Path(f"/proc/{connection.info.backend_pid}/limits").read_text()
    (data,) = [line.split() for line in limits.splitlines() if line.startswith("Max data size")]
    assert data[3:5] == [str(2 * 2**30)] * 2


async def test_refused_queries_write_nothing_into_the_log(asked: Asked) -> None:
    before = asked.log.stat().st_size
    await asked.ask("SELECT repeat('x', 1000000)::int")
    await asked.ask("SELECT nothing")
    assert asked.log.stat().st_size == before


async def _wait_for_queries(asked: Asked, number: int) -> None:
    others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state = 'active'"
    running = f"SELECT count(*) {others} AND query LIKE '%cua_rl_ask(%'"
    async with asyncio.timeout(patience(60)):
        while run_sql(asked.reader, running) != [(number,)]:
            await asyncio.sleep(0.05)


async def test_three_queries_at_a_time_are_answered_and_a_fourth_is_told_to_wait(asked: Asked) -> None:
    connections = [psycopg.connect(asked.reader) for _ in range(3)]
    refused = await asked.ask("SELECT 1")
    for connection in connections:
        connection.close()
    assert (refused.status_code, "at most three queries" in refused.text) == (422, True)


async def test_only_who_may_read_the_pages_may_ask(asked: Asked) -> None:
    engine = make_writer_engine(asked.url)
    _, project = create_project(engine, "a sender")
    engine.dispose()
    rules = AccessRules(write_token=WRITE_TOKEN, read_token="a-read-token-for-tests")
    app = make_app(Databases([open_database(asked.url)]), rules)
    transport = httpx.ASGITransport(app=guard(app, rules), raise_app_exceptions=False)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        app.router.lifespan_context(app),
    ):
        for token, status in ((None, 401), (project, 401), ("a-read-token-for-tests", 200), (WRITE_TOKEN, 200)):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            assert (await client.get("/api/runs/1/sql", headers=headers)).status_code == status
            answered = await client.post("/api/runs/1/sql", json={"sql": "SELECT 1"}, headers=headers)
            assert answered.status_code == status
    sent_by_another_site = {"content": '{"sql": "SELECT 1"}', "headers": {"Content-Type": "text/plain"}}
    async with httpx.AsyncClient(base_url=asked.client.base_url, trust_env=False, timeout=patience(30)) as browser:
        refused = await browser.post("/api/runs/1/sql", **sent_by_another_site)
    assert refused.status_code == 415


@pytest.mark.asyncio(loop_scope="function")
async def test_a_database_in_which_the_monitor_can_make_no_role_stays_closed(monitor: Monitor) -> None:
    async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
        await recorder.record(start())
        await recorder.flush()
    assert "makes no role" in (await monitor.json("/api/runs/1/sql"))["closed"]
    answered = await monitor.client.post("/api/runs/1/sql", json={"sql": "SELECT 1"})
    assert (answered.status_code, "psql" in answered.text) == (409, True)
    with pytest.raises(psycopg.OperationalError, match=r"no pg_hba\.conf entry"):
        psycopg.connect(monitor.url.replace("cua_rl@", "cua_rl_reader@"))


@pytest.mark.asyncio(loop_scope="function")
async def test_a_database_folder_of_an_earlier_version_gets_the_role_when_it_is_started(tmp_path: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        await migrate(postgres.url)
    (tmp_path / "data" / "pg_hba.conf").write_text("local all cua_rl peer map=controller\n")
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        # as a run hands it to its own monitor
        database = open_database(make_url(postgres.url).render_as_string(hide_password=False))
        found = await answer(await open_reader(database), "SELECT count(*) FROM rollouts")
        await database.engine.dispose()
    assert found.rows == [["0"]]
