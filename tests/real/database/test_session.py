import socket

import pytest

from cua_rl.database.session import check_connection, database_url, shown_url
from cua_rl.types.errors import ConfigError, DatabaseError
from tests.patience import IdleClock


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"POSTGRES_PASSWORD": "x"}, None),
        ({"DATABASE_URL": "postgresql://u:p@h:1/d"}, "postgresql+psycopg://u:p@h:1/d"),
        ({"DATABASE_URL": "postgres://h/d"}, "postgresql+psycopg://h/d"),
        ({"DATABASE_URL": "postgresql+psycopg://h/d?sslmode=require"}, "postgresql+psycopg://h/d?sslmode=require"),
        ({"POSTGRES_DB": "d", "POSTGRES_USER": "u"}, "postgresql+psycopg://u@127.0.0.1:5432/d"),
        (
            {
                "POSTGRES_HOST": "h",
                "POSTGRES_PORT": "5433",
                "POSTGRES_DB": "d",
                "POSTGRES_USER": "u",
                "POSTGRES_PASSWORD": "p@/ss",
            },
            "postgresql+psycopg://u:p%40%2Fss@h:5433/d",
        ),
    ],
)
def test_the_environment_names_the_database(environ: dict[str, str], expected: str | None) -> None:
    assert database_url(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"DATABASE_URL": "sqlite:///x.db"}, "got the scheme 'sqlite'"),
        ({"DATABASE_URL": "secret without scheme"}, "something that is no URL"),
        ({"DATABASE_URL": "postgresql://u:secret@h:port/d"}, "something that is no URL"),
        ({"POSTGRES_HOST": "h", "POSTGRES_USER": "u"}, "got no POSTGRES_DB"),
        ({"POSTGRES_DB": "d", "POSTGRES_USER": "u", "POSTGRES_PORT": "x"}, "got 'x'"),
    ],
)
def test_settings_that_cannot_work_are_explained_without_secrets(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        database_url(environ)

    assert "secret" not in str(raised.value)


async def test_a_reachable_database_passes_the_check(server_url: str) -> None:
    await check_connection(server_url)


async def test_a_refused_connection_is_explained_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        url = f"postgresql://user:secret@127.0.0.1:{taken.getsockname()[1]}/d"

        with pytest.raises(DatabaseError, match=r"expected a Postgres server at .*user:\*\*\*@.*refused") as raised:
            await check_connection(url)

    assert "secret" not in str(raised.value)


async def test_a_server_that_says_nothing_is_given_up_after_three_seconds() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        clock = IdleClock()

        with pytest.raises(DatabaseError, match="expected a Postgres server"):
            await check_connection(f"postgresql://user:secret@127.0.0.1:{silent.getsockname()[1]}/d")

    assert clock.look() < 20  # without a limit of our own, libpq waits for minutes


async def test_a_missing_database_is_named(server_url: str) -> None:
    with pytest.raises(DatabaseError, match=r"nowhere.* does not exist"):
        await check_connection(server_url.replace("@/postgres?", "@/nowhere?"))


def test_a_shown_url_hides_the_password() -> None:
    assert shown_url("postgresql://u:secret@h/d") == "postgresql+psycopg://u:***@h/d"
