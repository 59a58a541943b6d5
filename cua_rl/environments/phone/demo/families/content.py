"""Families of tasks about what a phone holds: files, pages of the browser, photos, tracks, sums."""

from math import prod
from random import Random

from cua_rl.environments.phone.demo.families.apps import Pool, open_from_home, start_with, tap_keys
from cua_rl.environments.phone.demo.template import Instance, Move, TapKey, Tell, family, tap, type_in
from cua_rl.environments.phone.simulator.apps.browser import WEB_PAGES
from cua_rl.environments.phone.simulator.start import AppStart
from cua_rl.tasks.goal import Goal


@family(max_turns=8, category="input", difficulty="hard", tags=("app_task", "files"))
def create_folder(random: Random, names: tuple[str, ...]) -> Instance:
    name = random.choice(names)
    return Instance(
        instruction=f"Create a folder named {name} in Downloads.",
        start=start_with("files", AppStart(folders=("Downloads/",))),
        goal=Goal(query=f"file_exists:/sdcard/Download/{name}", expected="true"),
        route=(
            open_from_home("files"),
            tap("files", "Downloads"),
            tap("files/Downloads/", "New"),
            type_in("files/new", name, query="draft_text"),
            tap("files/new", "Create"),
        ),
    )


@family(max_turns=7, tags=("app_task", "files"))
def delete_folder(random: Random, names: tuple[str, ...]) -> Instance:
    name = random.choice(names)
    path = f"Downloads/{name}/"
    return Instance(
        instruction=f"Delete the folder {name} in Downloads.",
        start=start_with("files", AppStart(folders=(path,))),
        goal=Goal(query=f"file_exists:/sdcard/Download/{name}", expected="false"),
        route=(
            open_from_home("files"),
            tap("files", "Downloads"),
            tap("files/Downloads/", name),
            tap(f"files/{path}", "Delete"),
        ),
    )


@family(max_turns=7, category="input", tags=("app_task", "browser"))
def open_website(random: Random, pool: Pool) -> Instance:
    """Type an address into the browser."""
    address = random.choice(pool.addresses)
    return Instance(
        instruction=f"Open {address} in Chrome.",
        start=start_with("chrome"),
        goal=Goal(query="current_url", expected=address),
        route=(open_from_home("chrome"), *_enter(address)),
    )


def _enter(text: str) -> tuple[Move, ...]:
    """Type into the address bar of the browser's first page and press Enter."""
    return (
        tap("chrome", "Search", query="focused_field"),
        type_in("chrome", text, query="draft_text"),
        Move(screen="chrome", operation=TapKey(label="Enter")),
    )


@family(max_turns=7, category="input", tags=("app_task", "browser"))
def search_web(random: Random, pool: Pool) -> Instance:
    words = random.choice(pool.searches)
    return Instance(
        instruction=f'Search for "{words}" in Chrome.',
        start=start_with("chrome"),
        goal=Goal(query="current_search", expected=words),
        route=(open_from_home("chrome"), *_enter(words)),
    )


@family(max_turns=7, tags=("app_task", "browser"))
def follow_link(random: Random, bookmarks: tuple[str, ...]) -> Instance:
    """Open a bookmark, then a link on its page."""
    page = WEB_PAGES[random.choice(bookmarks)]
    link = WEB_PAGES[random.choice(page.links)]
    return Instance(
        instruction=f"In Chrome, open the bookmark {page.title} and follow its link to {link.title}.",
        start=start_with("chrome"),
        goal=Goal(query="current_url", expected=link.address),
        route=(open_from_home("chrome"), tap("chrome", page.title), tap(f"chrome/{page.address}", link.title)),
    )


@family(max_turns=8, category="input", difficulty="hard", tags=("app_task", "browser"))
def download_file(random: Random, addresses: tuple[str, ...], *, what: str) -> Instance:
    page = WEB_PAGES[random.choice(addresses)]
    return Instance(
        instruction=f"Open {page.address} in Chrome and download the {what} that it offers.",
        start=start_with("chrome"),
        goal=Goal(query=f"file_exists:/sdcard/Download/{page.file}", expected="true"),
        route=(open_from_home("chrome"), *_enter(page.address), tap(f"chrome/{page.address}", "Download")),
    )


@family(max_turns=5, difficulty="easy", tags=("app_task", "camera"))
def take_photo(random: Random) -> Instance:
    num_photos = random.randrange(3, 9)
    return Instance(
        instruction="Take one photo.",
        start=start_with("camera", AppStart(num_photos=num_photos)),
        goal=Goal(query="num_photos", expected=str(num_photos + 1)),
        route=(open_from_home("camera"), tap("camera", "Shutter")),
    )


@family(max_turns=4, tags=("app_task", "question"))
def count_photos(random: Random) -> Instance:
    """Count the photos in Gallery and say how many there are."""
    return Instance(
        instruction="How many photos are in Gallery? Answer with the number.",
        start=start_with("gallery", AppStart(num_photos=random.randrange(2, 12))),
        goal=Goal(query="num_photos", how="told"),
        route=(open_from_home("gallery"), Move(screen="gallery", operation=Tell(query="num_photos"))),
    )


@family(max_turns=5, tags=("app_task", "gallery"))
def open_photo(random: Random) -> Instance:
    """Open one photo of the grid, counted in reading order."""
    number = random.randrange(1, 7)
    return Instance(
        instruction=f"Open photo number {number} in Gallery.",
        start=start_with("gallery", AppStart(num_photos=random.randrange(7, 12))),
        goal=Goal(query="current_screen", expected=f"gallery/photo:{number - 1}"),
        route=(open_from_home("gallery"), tap("gallery", f"Photo {number}")),
    )


@family(max_turns=5, difficulty="easy", tags=("app_task", "music"))
def play_track(random: Random, pool: Pool) -> Instance:
    title = random.choice(pool.tracks)
    return Instance(
        instruction=f'Play "{title}" in Music.',
        start=start_with("music", AppStart(track=title)),
        goal=Goal(query="playing_title", expected=title),
        route=(open_from_home("music"), tap("music", title)),
    )


@family(max_turns=10, category="input", difficulty="hard", tags=("app_task", "question"))
def calculate(random: Random, operator: str, num_numbers: int = 2) -> Instance:
    """Work out a sum or a product with the calculator and say the result."""
    more = (random.randrange(11, 100) if operator == "+" else random.randrange(3, 10) for _ in range(num_numbers - 1))
    numbers = random.randrange(11, 100), *more
    result = sum(numbers) if operator == "+" else prod(numbers)
    asked = (" plus " if operator == "+" else " times ").join(map(str, numbers))
    return Instance(
        instruction=f"Use the calculator: what is {asked}? Answer with the number.",
        start=start_with("calculator"),
        goal=Goal(query="calculation", expected=str(result), how="told"),
        route=(
            open_from_home("calculator"),
            Move(screen="calculator", operation=Tell(query="calculation"), query="calculation", value=str(result)),
            *tap_keys("calculator", f"{operator.join(map(str, numbers))}=", "calculation"),
        ),
    )
