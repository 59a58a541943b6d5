"""Folders and files of the phone's storage: those of its seed, what was added and what was deleted.

Paths are relative to the storage's root; folders end with a slash, such as "Documents/". Android calls the folder shown
as Downloads "Download".
"""

from dataclasses import replace
from random import Random

from cua_rl.environments.phone.simulator import content, controls
from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.elements import Do, Push
from cua_rl.environments.phone.simulator.navigation import field_value, go_up
from cua_rl.environments.phone.simulator.state import PhoneState

DOWNLOADS = "Downloads/"
_ROOTS = ("/sdcard/", "/storage/emulated/0/")
_KINDS = {
    "Documents": "Letter {}.pdf",
    "Downloads": "File {}.zip",
    "Music": "Song {}.mp3",
    "Pictures": "Picture {}.jpg",
    "Receipts": "Receipt {}.pdf",
    "Recordings": "Memo {}.m4a",
    "Videos": "Clip {}.mp4",
    "Work": "Report {}.docx",
}


_BROWN = "#8a6a4a"


def list_folder(state: PhoneState, folder: str = "") -> tuple[str, ...]:
    """Paths of what lies directly in a folder ("" is the root): the seed's first, then what was added."""
    counts = dict(content.folders(state.seed))
    if folder:
        name = folder.rstrip("/")
        seeded = [f"{folder}{_KINDS[name].format(i + 1)}" for i in range(counts.get(name, 0))]
    else:
        seeded = [f"{name}/" for name in counts]
    seeded = [path for path in seeded if path not in state.apps.deleted_files]
    created = [path for path in state.apps.created_files if parent_of(path) == folder]
    return tuple(dict.fromkeys((*created, *seeded) if folder else (*seeded, *created)))


def exists(state: PhoneState, path: str) -> bool:
    return path in list_folder(state, parent_of(path))


def exists_on_device(state: PhoneState, path: str) -> bool:
    """The same for a path as Android has it, such as "/sdcard/Download/logo.svg"; folders need no slash."""
    for root in _ROOTS:
        path = path.removeprefix(root)
    path = path.rstrip("/")
    path = path.replace("Download", "Downloads", 1) if path.split("/")[0] == "Download" else path
    return exists(state, path) or exists(state, f"{path}/")


def add_file(state: PhoneState, path: str) -> PhoneState:
    folder = parent_of(path)
    state = add_file(state, folder) if folder and not exists(state, folder) else state
    if exists(state, path):
        return state
    return replace(state, apps=replace(state.apps, created_files=(*state.apps.created_files, path)))


def remove_file(state: PhoneState, path: str) -> PhoneState:
    """Remove a file, or a folder with its contents."""
    created = tuple(
        other
        for other in state.apps.created_files
        if other != path and not (path.endswith("/") and other.startswith(path))
    )
    return replace(
        state, apps=replace(state.apps, created_files=created, deleted_files=(*state.apps.deleted_files, path))
    )


def parent_of(path: str) -> str:
    """The folder that a path lies in; "" is the root."""
    return path.rstrip("/").rpartition("/")[0] + "/" if "/" in path.rstrip("/") else ""


def name_of(path: str) -> str:
    """The last part of a path, without a slash."""
    return path.rstrip("/").rpartition("/")[2]


def build_files(state: PhoneState, column: controls.Column) -> None:
    _add_entries(state, column, "")
    column.pin(controls.plus_button("new"))


def build_files_page(state: PhoneState, column: controls.Column, subscreen: str) -> str:
    """The form for a new folder, one file, or the contents of a folder."""
    if subscreen == "new":
        parent = state.subscreens[-2] if len(state.subscreens) > 1 else ""
        column.add_heading(f"In {name_of(parent) or 'the storage'}")
        controls.add_field(column, state, "folder", "Name")
        column.pin(controls.title_button("Create", Do(command="create_folder")))
        return "New folder"
    if not subscreen.startswith("file:"):
        if not list_folder(state, subscreen):
            column.add_text("This folder is empty")
        _add_entries(state, column, subscreen)
        column.pin(controls.plus_button("new"))
        if parent_of(subscreen):
            column.pin(controls.title_button("Delete", Do(command="delete_file")))
        return name_of(subscreen)
    path = subscreen.removeprefix("file:")
    if not exists(state, path):
        column.add_text("This file was deleted")
        return name_of(path)
    kind = path.rpartition(".")[2].upper()
    column.add(
        controls.place("paper", "Paper", "art", (66, 62, 60, 76), glyph="document", text=kind),
        controls.place("name", "Name", "text", (10, 144, WIDTH - 20, 22), text=name_of(path), ink="large"),
        controls.place("size", "Size", "text", (10, 168, WIDTH - 20, 14), text=_size(state, path), ink="centre"),
        controls.wide_button("Delete", 200, Do(command="delete_file")),
    )
    return name_of(parent_of(path))


def _add_entries(state: PhoneState, column: controls.Column, folder: str) -> None:
    for path in list_folder(state, folder):
        name, is_folder = name_of(path), path.endswith("/")
        column.stack(
            controls.row(
                f"{'folder' if is_folder else 'file'}:{name}",
                text=name,
                detail=f"{len(list_folder(state, path))} files" if is_folder else _size(state, path),
                glyph="files" if is_folder else "document",
                paper=_BROWN if is_folder else controls.BLUE,
                effect=Push(subscreen=path if is_folder else f"file:{path}"),
            )
        )
    column.y += 46  # so that the last row scrolls clear of the round button


def _size(state: PhoneState, path: str) -> str:
    return f"{Random(f'size-{state.seed}-{path}').randrange(20, 900)} kB"


def create_folder(state: PhoneState) -> PhoneState:
    """Make the folder whose name was typed in the folder that shows."""
    name = field_value(state, "folder").strip()
    if not name or "/" in name:
        return state
    parent = state.subscreens[-2] if len(state.subscreens) > 1 else ""
    return go_up(add_file(state, f"{parent}{name}/"))


def delete_file(state: PhoneState) -> PhoneState:
    return go_up(remove_file(state, state.subscreens[-1].removeprefix("file:")))
