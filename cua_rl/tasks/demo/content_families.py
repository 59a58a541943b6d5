"""Families of tasks about what a phone holds: files, pages of the browser, photos, tracks, sums."""

from random import Random

from cua_rl.devices.simulator.apps.browser import WEB_PAGES
from cua_rl.devices.simulator.start import AppStart, Start
from cua_rl.tasks.demo.app_families import Pool, app_template, open_from_home
from cua_rl.tasks.demo.template import Instance, Move, TapKey, TapOn, TaskTemplate, Tell, TypeIn
from cua_rl.tasks.goal import Goal


def _start(app: str, apps: AppStart | None = None) -> Start:
    return Start(first_page=("settings", app), apps=apps or AppStart())


def create_folder(task_id: str, names: tuple[str, ...]) -> TaskTemplate:
    """Make a new folder in Downloads."""

    def draw(random: Random) -> Instance:
        name = random.choice(names)
        return Instance(
            instruction=f"Create a folder named {name} in Downloads.",
            start=_start("files", AppStart(folders=("Downloads/",))),
            goal=Goal(query=f"file_exists:/sdcard/Download/{name}", expected="true"),
            route=(
                open_from_home("files"),
                Move(screen="files", deed=TapOn(label="Downloads")),
                Move(screen="files/Downloads/", deed=TapOn(label="New")),
                Move(screen="files/new", deed=TypeIn(text=name), query="draft_text"),
                Move(screen="files/new", deed=TapOn(label="Create")),
            ),
        )

    return app_template(task_id, draw, num_turns=6, category="input", difficulty="hard", tag="files")


def delete_folder(task_id: str, names: tuple[str, ...]) -> TaskTemplate:
    """Delete a folder in Downloads."""

    def draw(random: Random) -> Instance:
        name = random.choice(names)
        path = f"Downloads/{name}/"
        return Instance(
            instruction=f"Delete the folder {name} in Downloads.",
            start=_start("files", AppStart(folders=(path,))),
            goal=Goal(query=f"file_exists:/sdcard/Download/{name}", expected="false"),
            route=(
                open_from_home("files"),
                Move(screen="files", deed=TapOn(label="Downloads")),
                Move(screen="files/Downloads/", deed=TapOn(label=name)),
                Move(screen=f"files/{path}", deed=TapOn(label="Delete")),
            ),
        )

    return app_template(task_id, draw, num_turns=5, tag="files")


def open_website(task_id: str, pool: Pool) -> TaskTemplate:
    """Type an address into the browser."""

    def draw(random: Random) -> Instance:
        address = random.choice(pool.addresses)
        return Instance(
            instruction=f"Open {address} in Chrome.",
            start=_start("chrome"),
            goal=Goal(query="current_url", expected=address),
            route=(open_from_home("chrome"), *_enter(address)),
        )

    return app_template(task_id, draw, num_turns=5, category="input", tag="browser")


def _enter(text: str) -> tuple[Move, ...]:
    """Type into the address bar of the browser's first page and press Enter."""
    return (
        Move(screen="chrome", deed=TapOn(label="Search"), query="focused_field"),
        Move(screen="chrome", deed=TypeIn(text=text), query="draft_text"),
        Move(screen="chrome", deed=TapKey(label="Enter")),
    )


def search_web(task_id: str, pool: Pool) -> TaskTemplate:
    """Search for words in the browser."""

    def draw(random: Random) -> Instance:
        words = random.choice(pool.searches)
        return Instance(
            instruction=f'Search for "{words}" in Chrome.',
            start=_start("chrome"),
            goal=Goal(query="current_search", expected=words),
            route=(open_from_home("chrome"), *_enter(words)),
        )

    return app_template(task_id, draw, num_turns=5, category="input", tag="browser")


def follow_link(task_id: str, bookmarks: tuple[str, ...]) -> TaskTemplate:
    """Open a bookmark, then a link on its page."""

    def draw(random: Random) -> Instance:
        page = WEB_PAGES[random.choice(bookmarks)]
        link = WEB_PAGES[random.choice(page.links)]
        return Instance(
            instruction=f"In Chrome, open the bookmark {page.title} and follow its link to {link.title}.",
            start=_start("chrome"),
            goal=Goal(query="current_url", expected=link.address),
            route=(
                open_from_home("chrome"),
                Move(screen="chrome", deed=TapOn(label=page.title)),
                Move(screen=f"chrome/{page.address}", deed=TapOn(label=link.title)),
            ),
        )

    return app_template(task_id, draw, num_turns=5, tag="browser")


def download_file(task_id: str, addresses: tuple[str, ...], *, what: str) -> TaskTemplate:
    """Open a page and download the file it offers."""

    def draw(random: Random) -> Instance:
        page = WEB_PAGES[random.choice(addresses)]
        return Instance(
            instruction=f"Open {page.address} in Chrome and download the {what} that it offers.",
            start=_start("chrome"),
            goal=Goal(query=f"file_exists:/sdcard/Download/{page.file}", expected="true"),
            route=(
                open_from_home("chrome"),
                *_enter(page.address),
                Move(screen=f"chrome/{page.address}", deed=TapOn(label="Download")),
            ),
        )

    return app_template(task_id, draw, num_turns=6, category="input", difficulty="hard", tag="browser")


def take_photo(task_id: str) -> TaskTemplate:
    """Take one photo."""

    def draw(random: Random) -> Instance:
        num_photos = random.randrange(3, 9)
        return Instance(
            instruction="Take one photo.",
            start=_start("camera", AppStart(num_photos=num_photos)),
            goal=Goal(query="num_photos", expected=str(num_photos + 1)),
            route=(open_from_home("camera"), Move(screen="camera", deed=TapOn(label="Shutter"))),
        )

    return app_template(task_id, draw, num_turns=3, difficulty="easy", tag="camera")


def count_photos(task_id: str) -> TaskTemplate:
    """Count the photos in Gallery and say how many there are."""

    def draw(random: Random) -> Instance:
        return Instance(
            instruction="How many photos are in Gallery? Answer with the number.",
            start=_start("gallery", AppStart(num_photos=random.randrange(2, 12))),
            goal=Goal(query="num_photos", how="told"),
            route=(open_from_home("gallery"), Move(screen="gallery", deed=Tell(query="num_photos"))),
        )

    return app_template(task_id, draw, num_turns=2, tag="question")


def open_photo(task_id: str) -> TaskTemplate:
    """Open one photo of the grid, counted in reading order."""

    def draw(random: Random) -> Instance:
        number = random.randrange(1, 7)
        return Instance(
            instruction=f"Open photo number {number} in Gallery.",
            start=_start("gallery", AppStart(num_photos=random.randrange(7, 12))),
            goal=Goal(query="current_screen", expected=f"gallery/photo:{number - 1}"),
            route=(open_from_home("gallery"), Move(screen="gallery", deed=TapOn(label=f"Photo {number}"))),
        )

    return app_template(task_id, draw, num_turns=3, tag="gallery")


def play_track(task_id: str, pool: Pool) -> TaskTemplate:
    """Play a track by its title."""

    def draw(random: Random) -> Instance:
        title = random.choice(pool.tracks)
        return Instance(
            instruction=f'Play "{title}" in Music.',
            start=_start("music", AppStart(track=title)),
            goal=Goal(query="playing_title", expected=title),
            route=(open_from_home("music"), Move(screen="music", deed=TapOn(label=title))),
        )

    return app_template(task_id, draw, num_turns=3, difficulty="easy", tag="music")


def calculate(task_id: str, operator: str) -> TaskTemplate:
    """Work out a sum or a product with the calculator and say the result."""

    def draw(random: Random) -> Instance:
        one, two = random.randrange(11, 100), random.randrange(11, 100) if operator == "+" else random.randrange(3, 10)
        result = one + two if operator == "+" else one * two
        keys = f"{one}{operator}{two}="
        typing = tuple(
            Move(screen="calculator", deed=TapKey(label=key), query="calculation", value=keys[:i])
            for i, key in enumerate(keys)
        )
        sign = "plus" if operator == "+" else "times"
        return Instance(
            instruction=f"Use the calculator: what is {one} {sign} {two}? Answer with the number.",
            start=_start("calculator"),
            goal=Goal(query="calculation", expected=str(result), how="told"),
            route=(
                open_from_home("calculator"),
                Move(screen="calculator", deed=Tell(query="calculation"), query="calculation", value=str(result)),
                *typing,
            ),
        )

    return app_template(task_id, draw, num_turns=8, category="input", difficulty="hard", tag="question")
