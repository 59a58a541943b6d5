"""Folders of the trainer: complete or absent, whatever ends the process that writes them."""

from pathlib import Path

from cua_rl.training.folders import read_files, write_files


def test_what_a_killed_process_left_of_a_folder_is_removed_when_the_folder_is_written_again(tmp_path: Path) -> None:
    for leftover in (".step-3.partial-1", ".step-3.replaced-1", ".step-30.partial-1"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "weights").write_text("old")
    write_files(tmp_path / "step-3", {"weights": b"new"})
    assert read_files(tmp_path / "step-3") == {"weights": b"new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-30.partial-1", "step-3"]
