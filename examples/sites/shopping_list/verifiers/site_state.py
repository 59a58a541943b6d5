"""What the verifiers share: the state of the site, and how much of a wanted state is there."""

import json
from urllib.request import urlopen

SEED = {"Bread": (1, False), "Eggs": (2, False), "Milk": (1, True), "Rice": (3, False), "Tea": (1, True)}
"""(number, done) of each item when a rollout begins."""


def read_items(url: str) -> dict[str, tuple[int, bool]]:
    """(number, done) of each item."""
    with urlopen(f"{url}/api/state", timeout=10) as answer:
        return {item["name"]: (item["number"], item["done"]) for item in json.load(answer)["items"]}


def compare(url: str, wanted: dict[str, tuple[int, bool]]) -> dict[str, object]:
    """Success if the items are exactly the wanted ones; the score is the share of items that are as wanted."""
    items = read_items(url)
    names = items.keys() | wanted.keys()
    wrong = sorted(name for name in names if items.get(name) != wanted.get(name))
    message = f"not as wanted: {', '.join(wrong)}" if wrong else "all as wanted"
    return {"success": not wrong, "score": 1 - len(wrong) / max(1, len(names)), "message": message}
