"""Files of one JSON object a line that survive a crash: appended durably, read past damage, rewritten in one step."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

logger = logging.getLogger(__name__)


def append_record(path: Path, record: Mapping[str, object]) -> None:
    """Append one line, durable on return; a line that a crash cut short is closed off first."""
    line = json.dumps(record, allow_nan=False) + "\n"
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(file.fileno(), file.tell()):
            line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> list[dict[str, object]]:
    """All records in order; a damaged line is skipped with a warning that names it. No file, no records."""
    if not path.exists():
        return []
    records: list[dict[str, object]] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record: object = json.loads(line)
        except json.JSONDecodeError as error:
            logger.warning("skipping damaged line file=%s line=%s: %s", path, number, error)
            continue
        if isinstance(record, dict):
            records.append(cast("dict[str, object]", record))
    return records


def write_records(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Replace the file by these records in one step."""
    write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))


def write_text(path: Path, text: str) -> None:
    """Replace the file by this text in one step: a reader sees the old or the new one, never half."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _ends_with_newline(descriptor: int, size: int) -> bool:
    return os.pread(descriptor, 1, size - 1) == b"\n"
