# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false
"""TensorBoard's event files through its own pure Python writer: neither torch nor TensorFlow is imported."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardFiles:
    """Writes scalars; a thread of the writer's own does the disk work. Its libraries load here: they take 0.2 s."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore[missing-module-attribute] - made at import
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = Event
        self._summary: Any = Summary
        self._writer: Any = EventFileWriter(str(folder))
        if first_step > 1:
            # a restart mark makes TensorBoard forget events at its step and later
            self._writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one point to each metric's curve."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Write out what is queued."""
        self._writer.close()
