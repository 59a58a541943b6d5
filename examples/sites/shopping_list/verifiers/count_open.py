import re

from site_state import SEED, read_items


def verify(url: str, answer: str) -> tuple[bool, str]:
    if read_items(url) != SEED:
        return False, "the list was changed"
    said = re.findall(r"\d+", answer)
    return said == ["3"], f"the answer says {said}, the list has 3"
