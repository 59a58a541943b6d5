"""What programs of a desktop put into their home folder is read without waiting and without leaving the folder."""

import os
import resource
from pathlib import Path

import pytest

from cua_rl.environments.desktop.home import MAX_FILE_BYTES, MAX_NAMES, Home
from cua_rl.host.users import SystemUser
from cua_rl.types.errors import TaskError
from tests.patience import IdleClock


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home", SystemUser())
    home.make()
    return home


def test_a_file_is_read_as_it_was_written(home: Home) -> None:
    (home.path / "folder").mkdir()
    home.write_text("folder/note.txt", "Grüße\n")
    home.write_text("folder/note.txt", "Ω\n")

    assert home.read_text("folder/note.txt") == "Ω\n"
    assert home.read_text("folder/../folder/note.txt") == "Ω\n"
    assert home.read_text(str(home.path / "folder" / "note.txt")) == "Ω\n"
    assert home.listing() == "folder/\nfolder/note.txt"


def test_what_is_no_ordinary_file_has_no_text_at_once(home: Home, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(home.path / "pipe")
    (home.path / "zero").symlink_to("/dev/zero")
    (home.path / "link").symlink_to(tmp_path / "secret")
    (home.path / "out").symlink_to(tmp_path)
    (home.path / "loop").symlink_to("loop")
    with (home.path / "sparse").open("wb") as sparse:
        sparse.truncate(10_000_000_000)
    before_kib, clock = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, IdleClock()

    for name in ("pipe", "zero", "link", "out/secret", "loop", "sparse", "out", "absent", "a" * 5000):
        assert home.read_text(name) == "", name

    assert clock.look() < 5.0  # a read of ten gigabytes takes longer, one of a pipe never ends
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 20_000
    assert home.listing() == "link\nloop\nout\npipe\nsparse\nzero"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", ".", "folder/../../secret", "a\0b"])
def test_no_name_leads_out_of_the_folder(home: Home, name: str) -> None:
    with pytest.raises(TaskError, match="home folder"):
        home.read_text(name)


def test_texts_can_be_stored_whatever_they_hold(home: Home) -> None:
    (home.path / "odd").write_bytes(b"a\0b\xff")
    (home.path / "large").write_bytes(b"a" * MAX_FILE_BYTES)
    (home.path / os.fsdecode(b"name\n\xff")).touch()

    assert home.read_text("odd") == "a\ufffdb\ufffd"
    assert home.read_text("large") == "a" * MAX_FILE_BYTES
    assert home.listing().encode() == "large\nname\ufffd\ufffd\nodd".encode()


def test_a_file_is_written_beside_what_a_program_put_in_its_way(home: Home, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (home.path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(home.path / "pipe")

    for name in ("link", "pipe"):
        home.write_text(name, "mine")
        assert home.read_text(name) == "mine"

    assert (tmp_path / "secret").read_text() == "secret"


def test_a_deep_or_crowded_folder_is_listed_in_part_and_removed_wholly(home: Home) -> None:
    folder = os.open(home.path, os.O_RDONLY)
    for _ in range(1500):  # deeper than a path may be long
        os.mkdir("deep", dir_fd=folder)
        inner = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    assert home.listing().startswith("deep/\ndeep/deep/\n")
    for number in range(MAX_NAMES + 10):
        (home.path / str(number)).touch()
    assert len(home.listing().splitlines()) <= MAX_NAMES

    SystemUser().release(home.path)

    assert not home.path.exists()
