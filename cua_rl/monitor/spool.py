"""An on-disk queue: items wait here during an outage of the monitor and survive the end of the run. Blocking."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

_SEGMENT_BYTES = 8 * 2**20


class Spool:
    """Lines in files of about 8 MiB (`000001.jsonl`), read and deleted in order; `position.json` says how far.

    Holds at most `max_bytes`; lines beyond that are dropped and counted in `num_refused`.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self.num_refused = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._segment, self._offset = min(self._segments(), default=1), 0
        position = folder / "position.json"
        if position.exists():
            stored = json.loads(position.read_text(encoding="utf-8"))
            self._segment, self._offset = int(stored["segment"]), int(stored["offset"])
        segments = self._segments()
        for stale in segments:
            if stale < self._segment:
                self._path(stale).unlink()
        self._last = max([*segments, self._segment])
        # a process that died while it wrote left a part of a line
        newest = self._path(self._last)
        data = newest.read_bytes() if newest.exists() else b""
        if data and not data.endswith(b"\n"):
            os.truncate(newest, data.rfind(b"\n") + 1)
        self._num_bytes = sum(self._path(number).stat().st_size for number in self._segments()) - self._offset

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def append(self, lines: Iterable[bytes]) -> None:
        """Add lines, without their newlines; they are in the files when this returns."""
        taken: list[bytes] = []
        for line in lines:
            if self._num_bytes + len(line) + 1 > self._max_bytes:
                self.num_refused += 1
                continue
            taken.append(line + b"\n")
            self._num_bytes += len(line) + 1
        if not taken:
            return
        path = self._path(self._last)
        if path.exists() and path.stat().st_size >= _SEGMENT_BYTES:
            self._last += 1
            path = self._path(self._last)
        with path.open("ab") as file:
            file.writelines(taken)

    def peek(self, *, max_lines: int, max_bytes: int) -> tuple[list[bytes], int] | None:
        """The oldest lines, at least one, and the offset after them in their file; None if the queue is empty."""
        while True:
            lines, size = self._read(max_lines, max_bytes)
            if lines:
                return lines, self._offset + size
            if self._segment >= self._last:
                return None
            self._path(self._segment).unlink(missing_ok=True)
            self._segment, self._offset = self._segment + 1, 0
            self._save_position()

    def _read(self, max_lines: int, max_bytes: int) -> tuple[list[bytes], int]:
        lines: list[bytes] = []
        size = 0
        path = self._path(self._segment)
        if not path.exists():
            return lines, size
        with path.open("rb") as file:
            file.seek(self._offset)
            while len(lines) < max_lines:
                line = file.readline()
                if not line.endswith(b"\n") or (lines and size + len(line) > max_bytes):
                    break
                lines.append(line[:-1])
                size += len(line)
        return lines, size

    def acknowledge(self, offset: int) -> None:
        """Remove the lines up to this offset, which have arrived."""
        self._num_bytes -= offset - self._offset
        self._offset = offset
        self._save_position()

    def _segments(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("[0-9]*.jsonl"))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.jsonl"

    def _save_position(self) -> None:
        aside = self._folder / "position.json.new"
        with aside.open("w", encoding="utf-8") as file:
            json.dump({"segment": self._segment, "offset": self._offset}, file)
            file.flush()
            os.fsync(file.fileno())  # an empty file after a loss of power would end the next attempt
        os.replace(aside, self._folder / "position.json")
