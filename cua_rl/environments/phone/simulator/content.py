"""Content of the simulated phone, drawn from its seed: people, notes, mails, tracks."""

from random import Random

from cua_rl.environments.phone.simulator.state import Text, Thread

_PEOPLE = (
    "Ada",
    "Ben",
    "Chloe",
    "David",
    "Emma",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Liam",
    "Mina",
    "Noah",
)
_NOTES = (
    "Buy oat milk",
    "Call the bank",
    "Book train to Bern",
    "Water the plants",
    "Gift for Emma",
    "Return library books",
)
_QUESTIONS = ("Are you home?", "Lunch at noon?", "Did you see the news?", "Can you call me?", "See you at 8?")
_ANSWERS = ("Yes, sure.", "Give me an hour.", "On my way.", "Sounds good.", "Not today.")
_SUBJECTS = (
    "Your invoice",
    "Team lunch",
    "Flight details",
    "Weekly report",
    "Parcel on its way",
    "New login",
    "Invitation",
)
_TRACKS = (
    "Blue Hour",
    "Paper Boats",
    "Northern Line",
    "Slow River",
    "Glass Garden",
    "Late Train",
    "Saffron",
    "Low Tide",
)
_FOLDERS = ("Documents", "Downloads", "Music", "Pictures", "Receipts", "Recordings", "Videos", "Work")
_SKIES = ("Sunny", "Cloudy", "Light rain", "Windy", "Clear")


def _random(seed: int, topic: str) -> Random:
    return Random(f"{topic}-{seed}")


def notes(seed: int) -> tuple[str, ...]:
    """Notes written before the task began."""
    random = _random(seed, "notes")
    return tuple(random.sample(_NOTES, random.randrange(1, 4)))


def threads(seed: int) -> tuple[Thread, ...]:
    """Conversations in the Messages app."""
    random = _random(seed, "threads")
    return tuple(
        Thread(
            contact=contact,
            texts=(
                Text(text=random.choice(_QUESTIONS), is_mine=False),
                Text(text=random.choice(_ANSWERS), is_mine=True),
            ),
        )
        for contact in random.sample(_PEOPLE, 5)
    )


def contacts(seed: int) -> tuple[tuple[str, str], ...]:
    """(name, phone number), sorted by name."""
    random = _random(seed, "contacts")
    return tuple((name, f"555 {random.randrange(1000, 10_000)}") for name in sorted(random.sample(_PEOPLE, 10)))


def mails(seed: int) -> tuple[tuple[str, str], ...]:
    """(sender, subject), newest first."""
    random = _random(seed, "mails")
    return tuple(zip(random.sample(_PEOPLE, 6), random.sample(_SUBJECTS, 6), strict=True))


MAIL_LINES = (
    "Hello,",
    "please find the details below.",
    "Let us know if anything",
    "is missing or unclear.",
    "Kind regards",
)
"""The body of every mail."""


def tracks(seed: int) -> tuple[tuple[str, str], ...]:
    """(title, artist) in the Music app."""
    random = _random(seed, "tracks")
    return tuple((title, random.choice(_PEOPLE)) for title in random.sample(_TRACKS, 6))


def folders(seed: int) -> tuple[tuple[str, int], ...]:
    """(name, number of files) in the Files app."""
    random = _random(seed, "folders")
    return tuple((name, random.randrange(1, 60)) for name in sorted(random.sample(_FOLDERS, 6)))


def alarms(seed: int) -> tuple[str, ...]:
    """Times of the alarms, such as "06:45"."""
    random = _random(seed, "alarms")
    minutes = sorted(random.sample(range(5 * 60, 10 * 60, 15), 3))
    return tuple(f"{minute // 60:02d}:{minute % 60:02d}" for minute in minutes)


def forecast(seed: int) -> tuple[tuple[str, str, int], ...]:
    """(day, sky, degrees Celsius) for the next days, today first."""
    random = _random(seed, "forecast")
    days = ("Today", "Tuesday", "Wednesday", "Thursday", "Friday")
    return tuple((day, random.choice(_SKIES), random.randrange(2, 31)) for day in days)
