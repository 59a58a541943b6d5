import asyncio
import errno
import os
from pathlib import Path

import pytest

from cua_rl.types.errors import DatabaseError, DiskFullError, TrainingError, first_error, writing

NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_an_error_of_tasks_side_by_side_is_the_one_that_says_something() -> None:
    lost = DatabaseError("the database is away")

    async def fail() -> None:
        raise lost

    async def run_group() -> None:
        async with asyncio.TaskGroup() as members:
            members.create_task(fail())

    async def run_step() -> None:
        async with asyncio.TaskGroup() as groups:
            groups.create_task(run_group())

    (ended,) = await asyncio.gather(run_step(), return_exceptions=True)

    assert isinstance(ended, ExceptionGroup)
    assert first_error(ended) is lost
    assert first_error(lost) is lost


@pytest.mark.parametrize(
    "error",
    [
        NO_ROOM,
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        ExceptionGroup("tasks", [NO_ROOM]),
    ],
)
def test_a_full_disk_is_an_error_that_names_the_folder_and_what_to_do(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(DiskFullError) as caught, writing(tmp_path):
        raise error
    expected = f"disk full: expected room in {str(tmp_path)!r}, got "
    assert str(caught.value).startswith(expected)
    assert "; free space there or raise the quota" in str(caught.value)


def test_a_library_that_fails_again_while_it_closes_its_file_hides_no_full_disk(tmp_path: Path) -> None:
    def save() -> None:  # as torch.save does
        try:
            raise NO_ROOM
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")

    with pytest.raises(DiskFullError), writing(tmp_path):
        save()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, os.strerror(errno.EACCES)),
        TrainingError("its log ends: No space left on device"),
        DiskFullError("disk full: expected room in '/elsewhere', got none"),
    ],
)
def test_other_errors_and_those_that_say_so_already_stay_as_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, writing(tmp_path):
        raise error
    assert caught.value is error
