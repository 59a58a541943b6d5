"""People's own queries in SQL: one SELECT, as a role that may only read what the pages show, within limits.

Each query has a connection of its own, a read-only transaction that is never committed, and ends with its request. What
the role may call is settled where it is made (`database/postgres_launcher.py`), and so is the memory of a connection.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import psycopg
from sqlalchemy import make_url, text
from sqlalchemy.dialects import postgresql

from cua_rl.database.models import Base
from cua_rl.database.postgres_launcher import ASK, READER, ROLE
from cua_rl.monitor import sql_schemas as schemas
from cua_rl.monitor.databases import Database
from cua_rl.types.errors import CuaError

TIME_LIMIT_S = 10.0
_TRANSFER_S = 2.0
MAX_ROWS = 1000
MAX_CHARACTERS = 2**20
MAX_CELL_CHARACTERS = 4000
_TABLES = (
    *("trainings", "steps", "evals", "tasks", "groups", "rollouts", "turns", "validations", "environments", "replays"),
    *("judgements", "judge_prompts", "rollout_overrides", "checkpoints", "status_history", "rollout_images"),
    *("screenshots", "analyses", "notes"),
)
_HELD_BACK = {("screenshots", "data")}
_OPTIONS = (
    "-c idle_in_transaction_session_timeout=30000 -c timezone=UTC "
    "-c max_parallel_workers_per_gather=0 -c lock_timeout=2000 -c client_min_messages=error"
)
_TOO_SLOW = (
    f"expected an answer within {TIME_LIMIT_S:.0f} s, the query was stopped; narrow it, for example with "
    "WHERE training_id = …, or ask for fewer turns"
)
_PREPARE = "PREPARE asked AS "
_PIECES = re.compile(  # of a query; what ends it and may follow its end is in the first group
    r"(\s+|;|--[^\n]*|/\*.*?\*/)|/\*.*|E'(?:[^'\\]|\\.|'')*'?|'[^']*'?|\"[^\"]*\"?|\$(\w*)\$(?:.*?\$\2\$|.*)|\w+|.",
    re.DOTALL | re.IGNORECASE,
)
_NUMBERS = frozenset({"int2", "int4", "int8", "float4", "float8", "numeric", "oid"})
_GRANT_LOCK = 7_423_002  # of two monitors that grant at once, one would fail
_Rows = list[list[str | None]]


class SqlClosedError(CuaError):
    """The database cannot be asked in SQL."""


class SqlError(CuaError, ValueError):
    """The query was refused or ended by Postgres, or it passed a limit."""


def list_tables() -> list[schemas.SqlTable]:
    """What a query can read."""
    dialect = postgresql.dialect()
    return [
        schemas.SqlTable(
            name=name,
            columns=[
                schemas.SqlField(
                    name=column.name,
                    type=column.type.compile(dialect).lower(),
                    refers_to=next((key.target_fullname for key in column.foreign_keys), None),
                )
                for column in Base.metadata.tables[name].columns
                if (name, column.name) not in _HELD_BACK
            ],
        )
        for name in _TABLES
    ]


async def open_reader(database: Database) -> str:
    """Address of the database for the reading role, which may read the tables afterwards; raises `SqlClosedError`."""
    address = make_url(database.url)
    folder = str(address.query.get("host", ""))
    if (address.username, address.host, address.database) != (ROLE, None, "postgres") or not folder.startswith("/"):
        raise SqlClosedError(
            "expected a run with a database of its own, got one in a shared or external database: the monitor makes no "
            "role there that may only read. Ask it with psql and a role of yours (docs/database.md)"
        )
    async with database.sessions() as session:
        if not await session.scalar(text("SELECT to_regrole(:role) IS NOT NULL"), {"role": READER}):
            raise SqlClosedError(
                "expected a database that this version started, got one whose server was started by an earlier one; "
                "queries work once the run has ended or was resumed"
            )
        missing = text(
            "SELECT name FROM unnest(CAST(:names AS text[])) AS name "
            "WHERE NOT has_any_column_privilege(:role, name, 'SELECT')"
        )
        if (await session.scalars(missing, {"names": list(_TABLES), "role": READER})).all():
            await session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _GRANT_LOCK})
            for table in list_tables():
                columns = f"({', '.join(one.name for one in table.columns)})" if table.name in dict(_HELD_BACK) else ""
                await session.execute(text(f"GRANT SELECT {columns} ON {table.name} TO {READER}"))
            await session.commit()
    return f"postgresql://{READER}@/postgres?host={folder}"


async def answer(url: str, sql: str, *, time_limit_s: float = TIME_LIMIT_S) -> schemas.SqlAnswer:
    """The rows of one SELECT; raises `SqlError`. Cancelling it cancels the query."""
    options = f"{_OPTIONS} -c statement_timeout={1000 * time_limit_s:.0f}"
    started = time.monotonic()
    asked = sql[: max((one.end() for one in _PIECES.finditer(sql) if one[1] is None), default=0)]
    try:
        async with asyncio.timeout(time_limit_s + _TRANSFER_S):
            connection = await psycopg.AsyncConnection.connect(url, connect_timeout=3, options=options)
            try:
                await connection.set_read_only(True)
                # parsed alone first, so that it can close no bracket of ours: one statement, by the extended protocol
                await connection.execute(f"{_PREPARE}{asked}".encode(), prepare=True)
                described = await asyncio.to_thread(connection.pgconn.describe_prepared, b"asked")  # not yet planned
                columns: list[schemas.SqlColumn] = []
                for place in range(described.nfields):
                    oid, name = described.ftype(place), (described.fname(place) or b"").decode()
                    info = connection.adapters.types.get(oid)  # also for an array of the type
                    kind = "other" if info is None else info.name if info.oid == oid else f"{info.name}[]"
                    columns.append(schemas.SqlColumn(name=name, type=kind, is_number=kind in _NUMBERS))
                if not columns:
                    raise SqlError("expected a SELECT with columns, got a query that returns none; name some")
                rows, cut = await _rows(connection, asked, len(columns))
            finally:
                await connection.close()  # without a commit
    except TimeoutError:
        raise SqlError(_TOO_SLOW) from None
    except psycopg.Error as error:
        raise SqlError(_explain(error, asked)) from None
    return schemas.SqlAnswer(columns=columns, rows=rows, cut=cut, duration_s=time.monotonic() - started)


async def _rows(
    connection: psycopg.AsyncConnection, asked: str, num_columns: int
) -> tuple[_Rows, schemas.SqlCut | None]:
    """Values as text, and what cut them off. The server shortens them: a row of a gigabyte must not arrive here."""
    names = [f"c{index}" for index in range(num_columns)]
    values = ", ".join(f"left({name}::text, {MAX_CELL_CHARACTERS + 1})" for name in names)
    query = f"SELECT ARRAY[{values}] FROM (\n{asked}\n) AS asked({', '.join(names)}) LIMIT {MAX_ROWS + 1}"
    rows: _Rows = []
    num_characters = 0
    async with connection.cursor() as cursor:
        # a generator by its documentation, an iterator by its type; closed early, it cancels the query
        stream = cast(
            AsyncGenerator[tuple[list[str | None]]], cursor.stream(f"SELECT * FROM {ASK}(%s)".encode(), (query,))
        )
        async with aclosing(stream):
            async for (row,) in stream:
                num_characters += sum(len(value or "") for value in row)
                if num_characters > MAX_CHARACTERS:
                    return rows, "size"
                if len(rows) == MAX_ROWS:
                    return rows, "rows"
                rows.append(
                    [value if value is None or len(value) <= MAX_CELL_CHARACTERS else f"{value[:-1]}…" for value in row]
                )
    return rows, None


def _explain(error: psycopg.Error, asked: str) -> str:
    """What Postgres says, with the line where it says so, and what to do where that is ours to know."""
    said = error.diag.message_primary or " ".join(str(error).split())
    match error:
        case psycopg.errors.QueryCanceled():
            return _TOO_SLOW
        case psycopg.errors.InsufficientPrivilege():
            return (
                f"{said}: queries read the tables and columns in the list, and call no function that changes anything"
            )
        case psycopg.errors.OutOfMemory():
            return f"{said}: the query needs more memory than it may have; ask for fewer or smaller values"
        case psycopg.OperationalError() if "too many connections" in str(error):
            return "expected at most three queries at a time, others are being answered; try again in some seconds"
        case psycopg.errors.SyntaxError() if "multiple commands" in said:
            return "expected one statement, got several; leave the others out"
        case psycopg.errors.SyntaxError() | psycopg.errors.FeatureNotSupported() if not error.diag.statement_position:
            return f"expected a query that only reads (SELECT, WITH or VALUES), got another: {said}"
        case _:
            place = int(error.diag.statement_position or 0) - len(_PREPARE)
            where = f" (line {asked.count(chr(10), 0, place - 1) + 1})" if 0 < place <= len(asked) else ""
            hint = f"; {error.diag.message_hint}" if error.diag.message_hint else ""
            return f"{said}{where}{hint}"


def saved_queries(training_id: int) -> list[schemas.SavedQuery]:
    """Queries to begin with, for one run."""
    return [schemas.SavedQuery(name=name, sql=sql.format(run=training_id)) for name, sql in _SAVED.items()]


_SAVED = {
    "Success per task and step": """\
SELECT step, avg(success::int)::float8 AS success, rollouts.task_id, count(*) AS rollouts
FROM rollouts JOIN groups ON groups.id = group_pk JOIN steps ON steps.id = step_id
WHERE rollouts.training_id = {run} AND rollouts.status = 'completed' AND parent_id IS NULL
GROUP BY step, rollouts.task_id ORDER BY step, task_id""",
    "Largest gaps between sampler and trainer": """\
SELECT rollout_id, max_gap, max_log_ratio, min_logprob, task_id, num_turns
FROM rollouts WHERE training_id = {run} AND max_gap IS NOT NULL
ORDER BY max_gap DESC LIMIT 100""",
    "Slowest devices": """\
SELECT device_id, percentile_cont(0.95) WITHIN GROUP (ORDER BY duration_s) AS p95_s, avg(duration_s) AS mean_s,
    count(*) AS rollouts, count(*) FILTER (WHERE status = 'failed') AS faults
FROM rollouts WHERE training_id = {run} AND device_id IS NOT NULL AND duration_s IS NOT NULL
GROUP BY device_id ORDER BY p95_s DESC LIMIT 100""",
    "Sampled tokens per success": """\
SELECT step, sum(num_sampled_tokens)::float8 / nullif(count(*) FILTER (WHERE success), 0) AS tokens_per_success,
    sum(num_sampled_tokens) AS tokens, count(*) FILTER (WHERE success) AS successes
FROM rollouts JOIN groups ON groups.id = group_pk JOIN steps ON steps.id = step_id
WHERE rollouts.training_id = {run} AND rollouts.status = 'completed'
GROUP BY step ORDER BY step""",
    "Turns until a success": """\
SELECT num_turns, count(*) AS rollouts, count(*) FILTER (WHERE success) AS successes
FROM rollouts WHERE training_id = {run} AND status = 'completed'
GROUP BY num_turns ORDER BY num_turns""",
}
