from site_state import SEED, compare


def verify(url: str) -> dict[str, object]:
    return compare(url, {name: item for name, item in SEED.items() if not item[1]})
