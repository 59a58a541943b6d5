"""Parses a judge's answer. Strict: anything but exactly one verdict is malformed; nothing is guessed."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n```", re.DOTALL)
_KEYS = {"success", "reason", "score"}


class MalformedVerdict(ValueError):
    """The answer is not a verdict; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judge's answer."""

    success: bool
    reason: str
    score: float | None = None


def parse_verdict(text: str) -> Verdict:
    """Parse {"success": bool, "reason": text, "score": 0 to 1 (optional)}; a code fence around it is allowed.

    JSON inside other text is ignored: it could be a quotation of what the agent wrote.

    Raises:
        MalformedVerdict: the answer is anything else.
    """
    fenced = _FENCE.fullmatch(text.strip())
    try:
        value: object = json.loads(fenced.group(1) if fenced else text, object_pairs_hook=_unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MalformedVerdict(f"expected one JSON object, got {text[:200]!r} ({error})") from None
    found = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    success, reason = found.get("success"), found.get("reason")
    if not isinstance(success, bool) or not isinstance(reason, str) or not set(found) <= _KEYS:
        raise MalformedVerdict(
            f'expected "success" (true or false), "reason" (text), perhaps "score", nothing else, got {text[:200]!r}'
        )
    score = found.get("score")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1):
        raise MalformedVerdict(f'expected "score" as a number from 0 to 1, got {text[:200]!r}')
    return Verdict(success=success, reason=reason, score=None if score is None else float(score))


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Refuse duplicate keys: which of the values counts would depend on the parser."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise MalformedVerdict(f"expected every key once, got {[key for key, _ in pairs]!r}")
    return found
