"""Folders that are complete or absent, and their contents as bytes. Does not import torch."""

import os
import shutil
from collections.abc import Callable, Mapping
from hashlib import file_digest
from pathlib import Path

from cua_rl.types.errors import writing

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Write a folder beside `path` and rename it to `path`, so that it is complete or absent; replaces an older one.

    Raises `DiskFullError`.
    """
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


def mend_folders(parent: Path) -> None:
    """Undo or complete what processes that were killed in `write_folder` have left in a folder."""
    for replaced in parent.glob(".*.replaced-*"):  # killed between the two renames
        complete = replaced.with_name(replaced.name[1:].rpartition(".replaced-")[0])
        if not complete.exists():
            replaced.rename(complete)
    for leftover in (*parent.glob(".*.replaced-*"), *parent.glob(".*.partial-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def link_folder(source: Path, path: Path) -> None:
    """Make the folder `path` with the files of `source`, which nobody changes: without writing them, if possible."""

    def link(file: str, linked: str) -> None:
        try:
            os.link(file, linked)
        except OSError:  # a bucket or a share without links
            shutil.copyfile(file, linked)

    write_folder(path, lambda folder: shutil.copytree(source, folder, copy_function=link, dirs_exist_ok=True))


def file_sha256(file: Path) -> str | None:
    """The hash of a file's contents; None if there is no such file."""
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


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
