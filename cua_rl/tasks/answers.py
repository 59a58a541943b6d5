"""Decides whether a final message gives the right answer to a question, and only one: a list of candidates is not one.

A policy is rewarded for what this accepts, so nothing that names several candidates may pass.
"""

import re
import unicodedata
from decimal import Decimal

_PUNCTUATION = ".,;:!?\"'`*_~()[]{}<>#=%％$€£°“”‘’"
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_UNIT = re.compile(r"(?<=\d)(?:mb|mib|percent)$")
_BARE_POINT = re.compile(r"(?<![\w.])\.(?=\d)")  # ".5"
_BEFORE_VALUE = re.compile(r"(?<=[^\W\d])[:=](?=\S)")  # "battery:73"
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_SMALL_NUMBERS = {word: Decimal(number) for number, word in enumerate(_SMALL.split())}
_SCALES = frozenset({"dozen", "hundred", "thousand", "million", "billion", "k"})
_DENIALS = frozenset({"not", "never", "neither", "nor", "except", "cannot"})
_YES, _NO = frozenset({"true", "yes", "on", "enabled"}), frozenset({"false", "no", "off", "disabled"})
_MAX_QUOTES = 20  # characters between a lead-in and what it introduces, its own among them
_LEAD_IN = re.compile(r"(?::|\b(?:is|are))\s+")


def is_answer(said: str | None, wanted: str) -> bool:
    """Whether the message `said` answers `wanted` and nothing else.

    A number: the only number said, in digits or as a word up to twenty, among words of any kind; "%" and thousands
    separators are read. Digits in groups, such as a telephone number, a time or a date: these digits and no others.
    "true" and "false": words for yes or for no, not both. Other text: the whole message, or what follows its last
    colon, "is" or "are". A negated message ("not 7") is not an answer.
    """
    said, wanted = _plain(said or ""), _plain(wanted)
    words = [word.strip(_PUNCTUATION) for word in said.split()]
    if not wanted or not said or (_denies(words) and not _denies(wanted.split())):
        return False
    if (number := _as_decimal(wanted.strip(_PUNCTUATION))) is not None:
        return _numbers(words) == {number} and _SCALES.isdisjoint(words)
    if wanted in ("true", "false"):
        right, wrong = (_YES, _NO) if wanted == "true" else (_NO, _YES)
        return not right.isdisjoint(words) and wrong.isdisjoint(words)
    if re.search(r"\d", wanted) and not re.search(r"[^\W\d]", wanted):
        return _digits(said) == _digits(wanted)
    said, wanted = _bare(said), _bare(wanted)
    last = max(0, len(said) - len(wanted) - _MAX_QUOTES)  # a search of the whole for each lead-in would be quadratic
    starts = (0, *(lead_in.end() for lead_in in _LEAD_IN.finditer(said, last)))
    return said.endswith(wanted) and any(_bare(said[start:]) == wanted for start in starts)


def _plain(text: str) -> str:
    """Lower case, digits of all scripts as 0 to 9, one kind of minus and apostrophe."""
    digits = "".join(str(unicodedata.decimal(character, character)) for character in text)
    folded = digits.casefold().replace("\N{MINUS SIGN}", "-").replace("’", "'")
    return _BEFORE_VALUE.sub(": ", _BARE_POINT.sub("0.", folded)).strip()


def _denies(words: list[str]) -> bool:
    return any(word in _DENIALS or word.endswith("n't") for word in words)


def _numbers(words: list[str]) -> set[Decimal | None]:
    """The numbers said, None for digits that are part of something else; words only where there are no digits."""
    found: set[Decimal | None] = set()
    for before, word in zip(["", *words], words, strict=False):
        if any(character.isdigit() or character.isnumeric() for character in word):
            number = _as_decimal(_UNIT.sub("", word))
            found.add(-number if number is not None and before in ("minus", "negative") else number)
    return found or {_SMALL_NUMBERS[word] for word in words if word in _SMALL_NUMBERS}


def _as_decimal(text: str) -> Decimal | None:
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _digits(text: str) -> str:
    """All digits, and what separates hours and minutes."""
    return re.sub(r"[^\d:]", "", re.sub(r":(?!\d)", "", text))


def _bare(text: str) -> str:
    """`text` with single spaces, without quotes and punctuation around it."""
    return " ".join(text.split()).strip(_PUNCTUATION + " ")
