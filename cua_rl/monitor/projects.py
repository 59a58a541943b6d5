"""Projects, which may send runs. A token is shown once, when it is created; only its hash is stored."""

import re
from hashlib import sha256

from sqlalchemy import Connection, Engine, Select, select
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.monitor_models import Project
from cua_rl.monitor.security import make_token
from cua_rl.types.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")


def create_project(engine: Engine, name: str) -> tuple[int, str]:
    """A new project's id and token, or a new token for one that exists (the old one stops working)."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"create_project: expected up to 100 letters, digits, spaces, dots and dashes, got {name!r}; choose another"
        )
    token = make_token()
    values = {"token_sha256": _hash(token)}
    statement = insert(Project).values(name=name, **values)
    statement = statement.on_conflict_do_update(index_elements=["name"], set_=values).returning(Project.id)
    with engine.begin() as connection:
        return connection.execute(statement).scalar_one(), token


def find_project(connection: Connection, token: str) -> tuple[int, str] | None:
    row = connection.execute(project_of(token)).one_or_none()
    return None if row is None else (row.id, row.name)


def project_of(token: str) -> Select[int, str]:
    """The query for the id and name of a token's project."""
    return select(Project.id, Project.name).where(Project.token_sha256 == _hash(token))


def _hash(token: str) -> bytes:
    """One round is enough, because tokens are long and random."""
    return sha256(token.encode("utf-8", "replace")).digest()
