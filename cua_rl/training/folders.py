"""Folders that are complete or absent, and their contents as bytes. Does not import torch."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from cua_rl.types.errors import writing


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside `path` and rename it to `path`, so that it is complete or absent; replaces an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    replaced = path.with_name(f".{path.name}.replaced-{os.getpid()}")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        with writing(path.parent):
            write(partial)
            for file in (*partial.rglob("*"), partial):
                _fsync(file)
            if path.exists():
                path.rename(replaced)
            partial.rename(path)
            _fsync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def read_files(folder: Path) -> dict[str, bytes]:
    """Contents of all files by path in the folder; nothing if there is no folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write_files(path: Path, files: Mapping[str, bytes]) -> None:
    """Write what `read_files` read as the folder `path`."""

    def write(folder: Path) -> None:
        for name, contents in files.items():
            file = folder / name
            if not file.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"expected a path in the folder, got {name!r}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(contents)

    write_folder(path, write)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
