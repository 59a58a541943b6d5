"""Requests and responses of people's own queries in SQL."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cua_rl.monitor.schemas import Shown

SqlCut = Literal["rows", "size"]


class SqlField(Shown):
    name: str
    type: str
    refers_to: str | None = Field(description="table and column")


class SqlTable(Shown):
    """A table and its columns, as far as a query can read them."""

    name: str
    columns: list[SqlField]


class SavedQuery(Shown):
    name: str
    sql: str


class SqlPage(Shown):
    """What a query about a run's database can read, and queries to begin with."""

    closed: str | None = Field(description="why the database takes no queries; null if it takes them")
    tables: list[SqlTable]
    saved: list[SavedQuery]
    max_rows: int
    time_limit_s: float


class SqlQuestion(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sql: str = Field(min_length=1, max_length=20_000, pattern=r"^[^\x00]*$", description="one SELECT")


class SqlColumn(Shown):
    name: str
    type: str
    is_number: bool


class SqlAnswer(Shown):
    """Rows of a query, with values as Postgres writes them."""

    columns: list[SqlColumn]
    rows: list[list[str | None]]
    cut: SqlCut | None = Field(description="the limit that ended the list; null if these are all rows")
    duration_s: float
