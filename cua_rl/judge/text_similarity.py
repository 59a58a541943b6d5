"""How similar two texts are, from 0 to 1, by the metrics that OpenAI's text_similarity graders name.

`fuzzy_match` is rapidfuzz's ratio; `rouge_*` are F1 scores of words as in rouge-score without a stemmer (Lin, 2004);
`bleu` (Papineni et al., 2002) and `gleu` (arXiv:1609.08144) are of words, as in nltk without smoothing.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

_MAX_ORDER = 4


def _common_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, a row of its table at a time in the bits of a number (Hyyrö, 2004)."""
    places: dict[str, int] = {}
    for place, one in enumerate(b):
        places[one] = places.get(one, 0) | 1 << place
    every = row = (1 << len(b)) - 1
    for one in a:
        met = row & places.get(one, 0)
        row = ((row + met) | (row - met)) & every
    return len(b) - row.bit_count()


def fuzzy_match(text: str, reference: str) -> float:
    """Characters in common, in their order, as a share of all characters."""
    total = len(text) + len(reference)
    return 2 * _common_length(text, reference) / total if total else 1.0


def rouge_l(text: str, reference: str) -> float:
    a, b = _rouge_words(text), _rouge_words(reference)
    return _f1(_common_length(a, b), len(a), len(b))


def rouge_n(text: str, reference: str, order: int) -> float:
    a, b = _grams(_rouge_words(text), order), _grams(_rouge_words(reference), order)
    return _f1((a & b).total(), a.total(), b.total())


def bleu(text: str, reference: str) -> float:
    words, expected = text.split(), reference.split()
    precisions: list[float] = []
    for order in range(1, _MAX_ORDER + 1):
        found = _grams(words, order)
        precisions.append((found & _grams(expected, order)).total() / max(found.total(), 1))
    if not all(precisions):
        return 0.0
    brevity = min(1.0, math.exp(1 - len(expected) / len(words)))
    return brevity * math.exp(sum(map(math.log, precisions)) / _MAX_ORDER)


def gleu(text: str, reference: str) -> float:
    a, b = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for order in range(1, _MAX_ORDER + 1):
        a += _grams(text.split(), order)
        b += _grams(reference.split(), order)
    return (a & b).total() / max(a.total(), b.total(), 1)


def _rouge_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _grams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))


def _f1(num_common: int, num_found: int, num_expected: int) -> float:
    return 2 * num_common / (num_found + num_expected) if num_common else 0.0


METRICS: Mapping[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    "rouge_l": rouge_l,
    **{f"rouge_{order}": partial(rouge_n, order=order) for order in range(1, 6)},
}
