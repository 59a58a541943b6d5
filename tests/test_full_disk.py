"""A full disk says so, with its folder, wherever something is written. /dev/full has no room for a byte."""

import errno
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cua_rl.reporting.json_lines import append_record, write_text
from cua_rl.run.reporting import open_run_log
from cua_rl.run_folder.log_directory import prepare_log_directory
from cua_rl.training.folders import write_folder
from cua_rl.types.errors import DiskFullError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="others have no /dev/full")


def fill(path: Path) -> Path:
    """Let a file be on a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")
    return path


def write_checkpoint(folder: Path) -> None:
    def write(partial: Path) -> None:
        fill(partial / "weights").write_bytes(b"x")

    write_folder(folder / "state", write)


def append_attempt(folder: Path) -> None:
    append_record(fill(folder / "attempts.jsonl"), {"attempt": 1})


@pytest.mark.parametrize("write", [write_checkpoint, append_attempt])
def test_what_cannot_be_written_is_an_error_with_the_folder(write: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match=f"disk full: expected room in '{tmp_path}', got .*No space left"):
        write(tmp_path)
    assert not (tmp_path / "state").exists()


def test_a_replaced_file_keeps_its_old_text_where_the_new_one_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_text(tmp_path / "summary.json", "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskFullError, match=f"disk full: expected room in '{tmp_path}', got .*No space left"):
        write_text(tmp_path / "summary.json", "new")
    assert (tmp_path / "summary.json").read_text() == "old"


async def test_a_log_without_room_says_so_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with prepare_log_directory(tmp_path / "run", "ask") as folder:
        log = fill(folder.path / "logs" / "run.log")
        async with AsyncExitStack() as stack:
            open_run_log(stack, folder)
            for number in range(3):
                logging.getLogger("cua_rl.test").info("line %d", number)
    assert capsys.readouterr().err == f"disk full: {str(log)!r} misses lines; free space there\n"
