"""What desktops share in /tmp, where other users of the machine may have been first."""

import os
import subprocess
from pathlib import Path

import pytest

from cua_rl.environments.desktop.session import remove_stale_lock, take_socket_folder
from cua_rl.host.users import can_change_user
from cua_rl.types.errors import ConfigError


def ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_the_folder_of_sockets_is_made_for_all_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    for _ in range(2):
        take_socket_folder(folder)
        assert folder.stat().st_mode & 0o7777 == 0o1777
        assert folder.stat().st_uid == os.geteuid()


def test_a_link_in_place_of_the_folder_of_sockets_opens_nothing(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (tmp_path / "sockets").symlink_to(private)
    with pytest.raises(ConfigError, match="sockets"):
        take_socket_folder(tmp_path / "sockets")
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not can_change_user(), reason="not root: only root makes folders of other users")
def test_a_folder_of_sockets_that_another_user_made_becomes_roots(tmp_path: Path) -> None:
    (tmp_path / "sockets").mkdir()
    os.chown(tmp_path / "sockets", 2000, 2000)
    take_socket_folder(tmp_path / "sockets")
    assert (tmp_path / "sockets").stat().st_uid == 0


def test_the_lock_of_an_ended_process_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    for pid, stays in ((ended_pid(), False), (os.getpid(), True)):
        (tmp_path / "lock").write_text(f"{pid:10d}\n")
        remove_stale_lock(tmp_path / "lock")
        assert (tmp_path / "lock").exists() == stays


def test_links_and_pipes_in_place_of_a_lock_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(f"{ended_pid()}\n")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    (tmp_path / "endless").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "endless", "pipe"):
        remove_stale_lock(tmp_path / name)
        assert os.path.lexists(tmp_path / name)
