"""Folders and files of the phone's storage: those of its seed, what was added and what was deleted.

Paths are relative to the storage's root; folders end with a slash, such as "Documents/". Android calls the folder shown
as Downloads "Download".
"""

from dataclasses import replace

from cua_rl.devices.simulator import content
from cua_rl.devices.simulator.state import PhoneState

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


def list_folder(state: PhoneState, folder: str = "") -> tuple[str, ...]:
    """Paths of what lies directly in a folder ("" is the root): the seed's first, then what was added."""
    created = tuple(path for path in state.apps.created_files if parent_of(path) == folder)
    seeded = tuple(path for path in _seeded(state.seed, folder) if path not in state.apps.deleted_files)
    return tuple(dict.fromkeys((*created, *seeded))) if folder else tuple(dict.fromkeys((*seeded, *created)))


def exists(state: PhoneState, path: str) -> bool:
    """Whether there is a file or folder with this path."""
    return path in list_folder(state, parent_of(path))


def exists_on_device(state: PhoneState, path: str) -> bool:
    """The same for a path as Android has it, such as "/sdcard/Download/logo.svg"; folders need no slash."""
    for root in _ROOTS:
        path = path.removeprefix(root)
    path = path.rstrip("/")
    path = path.replace("Download", "Downloads", 1) if path.split("/")[0] == "Download" else path
    return exists(state, path) or exists(state, f"{path}/")


def add_file(state: PhoneState, path: str) -> PhoneState:
    """The state with a file or folder more, and with the folders above it."""
    folder = parent_of(path)
    state = add_file(state, folder) if folder and not exists(state, folder) else state
    if exists(state, path):
        return state
    return replace(state, apps=replace(state.apps, created_files=(*state.apps.created_files, path)))


def remove_file(state: PhoneState, path: str) -> PhoneState:
    """The state without a file, or without a folder and all that it held."""
    created = tuple(other for other in state.apps.created_files if not _is_within(other, path))
    return replace(
        state, apps=replace(state.apps, created_files=created, deleted_files=(*state.apps.deleted_files, path))
    )


def parent_of(path: str) -> str:
    """The folder that a path lies in; "" is the root."""
    return path.rstrip("/").rpartition("/")[0] + "/" if "/" in path.rstrip("/") else ""


def name_of(path: str) -> str:
    """The last part of a path, without a slash."""
    return path.rstrip("/").rpartition("/")[2]


def _is_within(path: str, folder: str) -> bool:
    return path == folder or (folder.endswith("/") and path.startswith(folder))


def _seeded(seed: int, folder: str) -> tuple[str, ...]:
    counts = dict(content.folders(seed))
    if not folder:
        return tuple(f"{name}/" for name in counts)
    name = folder.rstrip("/")
    return tuple(f"{folder}{_KINDS[name].format(i + 1)}" for i in range(counts.get(name, 0)))
