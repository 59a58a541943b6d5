"""JSON Lines files that survive a crash: durable appends, damaged lines skipped, atomic rewrites."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from secrets import token_hex

from cua_rl.types.errors import writing
from cua_rl.types.json_values import is_object

logger = logging.getLogger(__name__)


def append_record(path: Path, record: Mapping[str, object]) -> None:
    """Append one line, durable on return; a line that a crash truncated is terminated first."""
    append_records(path, [record])


def append_records(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """The same with several lines, written at once."""
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    with writing(path.parent), path.open("a+b") as file:
        size = file.tell()
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            lines = "\n" + lines
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> list[dict[str, object]]:
    """All records in order; damaged lines are skipped with a warning. A missing file has no records."""
    if not path.exists():
        return []
    records: list[dict[str, object]] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record: object = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            logger.warning("skipping damaged line file=%s line=%s: %s", path, number, error)
            continue
        if is_object(record):
            records.append(dict(record))
    return records


def write_records(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Replace the file by these records atomically."""
    write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))


def write_text(path: Path, text: str) -> None:
    """Replace the file by this text atomically: a reader sees the old or the new text, however many write at once."""
    # made anew: one that came with a stranger's folder may be a link to another file
    partial = path.with_name(f".{path.name}.partial-{token_hex(8)}")
    try:
        with writing(path.parent), partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
