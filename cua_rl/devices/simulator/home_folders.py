"""Folders of apps on the home pages. A folder's icon stands where an app's would, as "folder:" and its name."""

from dataclasses import replace

from cua_rl.devices.simulator.app_data import HomeFolder
from cua_rl.devices.simulator.home_layout import Pages, remove_icon
from cua_rl.devices.simulator.state import PhoneState

_MARK = "folder:"


def folder_name(icon: str) -> str | None:
    """The name of the folder that an icon stands for; None for an app's icon."""
    return icon.removeprefix(_MARK) if icon.startswith(_MARK) else None


def find_folder(state: PhoneState, name: str) -> HomeFolder | None:
    """The folder of this name."""
    return next((folder for folder in state.apps.home_folders if folder.name == name), None)


def make_folder(state: PhoneState, name: str, app: str, other: str) -> PhoneState:
    """Put two apps into a new folder that takes the place of `other`; a name that is taken changes nothing."""
    if not name or ":" in name or find_folder(state, name) is not None:
        return state
    pages = _with_icon(remove_icon(state.home_pages, app), other, f"{_MARK}{name}")
    folder = HomeFolder(name=name, apps=(other, app))
    return _with_folders(replace(state, home_pages=pages), *state.apps.home_folders, folder)


def rename_folder(state: PhoneState, name: str, new_name: str) -> PhoneState:
    """Give a folder another name; one that is taken changes nothing."""
    if not new_name or ":" in new_name or find_folder(state, new_name) is not None:
        return state
    folders = (replace(f, name=new_name) if f.name == name else f for f in state.apps.home_folders)
    pages = _with_icon(state.home_pages, f"{_MARK}{name}", f"{_MARK}{new_name}")
    return _with_folders(replace(state, home_pages=pages), *folders)


def drop_from_folders(state: PhoneState, app: str) -> PhoneState:
    """Take an app out of its folder; a folder that is empty then goes away."""
    folders = [replace(f, apps=tuple(other for other in f.apps if other != app)) for f in state.apps.home_folders]
    pages = state.home_pages
    for folder in folders:
        pages = pages if folder.apps else remove_icon(pages, f"{_MARK}{folder.name}")
    return _with_folders(replace(state, home_pages=pages), *(folder for folder in folders if folder.apps))


def _with_icon(pages: Pages, icon: str, new_icon: str) -> Pages:
    return tuple(tuple(replace(p, app=new_icon) if p.app == icon else p for p in page) for page in pages)


def _with_folders(state: PhoneState, *folders: HomeFolder) -> PhoneState:
    return replace(state, apps=replace(state.apps, home_folders=folders))
