"""Files: folders, what is in them, a new folder, one file."""

from random import Random

from cua_rl.devices.simulator.catalog import WIDTH
from cua_rl.devices.simulator.controls import BLUE, add_field, place, plus_button, title_button, wide_button
from cua_rl.devices.simulator.elements import Do, Push
from cua_rl.devices.simulator.file_tree import exists, list_folder, name_of, parent_of
from cua_rl.devices.simulator.layout import Column, row
from cua_rl.devices.simulator.state import PhoneState

_BROWN = "#8a6a4a"


def build_files(state: PhoneState, column: Column) -> None:
    """The folders of the storage."""
    _add_entries(state, column, "")
    column.pin(plus_button("new"))


def build_files_page(state: PhoneState, column: Column, subscreen: str) -> str:
    """A new folder, one file, or the content of a folder."""
    if subscreen == "new":
        return _new_folder(state, column)
    if subscreen.startswith("file:"):
        return _file(state, column, subscreen.removeprefix("file:"))
    return _folder(state, column, subscreen)


def _add_entries(state: PhoneState, column: Column, folder: str) -> None:
    for path in list_folder(state, folder):
        name, is_folder = name_of(path), path.endswith("/")
        column.add(
            row(
                f"{'folder' if is_folder else 'file'}:{name}",
                y=column.y,
                label=name,
                text=name,
                detail=f"{len(list_folder(state, path))} files" if is_folder else _size(state, path),
                glyph="files" if is_folder else "document",
                paper=_BROWN if is_folder else BLUE,
                effect=Push(subscreen=path if is_folder else f"file:{path}"),
            )
        )
    column.y += 46  # so that the last row scrolls clear of the round button


def _folder(state: PhoneState, column: Column, folder: str) -> str:
    if not list_folder(state, folder):
        column.add_text("This folder is empty")
    _add_entries(state, column, folder)
    column.pin(plus_button("new"))
    if parent_of(folder):
        column.pin(title_button("Delete", Do(command="delete_file")))
    return name_of(folder)


def _new_folder(state: PhoneState, column: Column) -> str:
    parent = state.subscreens[-2] if len(state.subscreens) > 1 else ""
    column.add_heading(f"In {name_of(parent) or 'the storage'}")
    add_field(column, state, "folder", "Name")
    column.pin(title_button("Create", Do(command="create_folder")))
    return "New folder"


def _file(state: PhoneState, column: Column, path: str) -> str:
    if not exists(state, path):
        column.add_text("This file was deleted")
        return name_of(path)
    column.add(place("paper", "Paper", "art", (66, 62, 60, 76), glyph="document", text=path.rpartition(".")[2].upper()))
    name = place("name", "Name", "text", (10, 144, WIDTH - 20, 22), text=name_of(path), ink="large")
    column.add(name, place("size", "Size", "text", (10, 168, WIDTH - 20, 14), text=_size(state, path), ink="centre"))
    column.add(wide_button("Delete", 200, Do(command="delete_file")))
    return name_of(parent_of(path))


def _size(state: PhoneState, path: str) -> str:
    return f"{Random(f'size-{state.seed}-{path}').randrange(20, 900)} kB"
