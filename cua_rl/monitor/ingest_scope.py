"""Whose batch is stored, and how its items find each other."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from cua_rl.database.monitor_models import IngestItem, ProjectRun
from cua_rl.errors import CuaError


class ItemRefused(CuaError):
    """An item cannot be stored; the message is told to its sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestScope:
    """One project's batch in one transaction."""

    connection: Connection
    project_id: int
    project_name: str

    def require_run(self, training_id: int) -> int:
        """`trainings.id`, if the run is this project's; raises `ItemRefused`."""
        query = select(ProjectRun.training_id).where(
            ProjectRun.training_id == training_id, ProjectRun.project_id == self.project_id
        )
        if self.connection.scalar(query) is None:
            raise ItemRefused(f"expected the training_id of a run of this project, got {training_id}")
        return training_id

    def find_item(self, kind: str, item_id: int) -> Any:
        """id, row_id and payload of an item that was sent before; raises `ItemRefused`."""
        query = select(IngestItem.id, IngestItem.row_id, IngestItem.payload).where(
            IngestItem.id == item_id, IngestItem.project_id == self.project_id, IngestItem.kind == kind
        )
        row = self.connection.execute(query).one_or_none()
        if row is None:
            raise ItemRefused(f"expected the id of an item among {kind}, got {item_id}; send that item first")
        return row

    def require_row(self, kind: str, item_id: int) -> int:
        """Key of the row that was made of an item; raises `ItemRefused`."""
        row_id = self.find_item(kind, item_id).row_id
        if row_id is None:
            raise ItemRefused(f"expected the id of an item among {kind} that is shown, got {item_id}")
        return row_id
