from site_state import SEED, compare


def verify(url: str) -> dict[str, object]:
    return compare(url, SEED | {"Bread": (1, True)})
