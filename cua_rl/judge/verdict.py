"""A judge's answer -> a verdict. Strict: whatever is not exactly one verdict is malformed, and never a guess."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n```", re.DOTALL)
_KEYS = {"success", "reason", "score"}


class MalformedVerdict(ValueError):
    """The answer is no verdict; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one answer of a judge says."""

    success: bool
    reason: str
    score: float | None = None


def parse_verdict(text: str) -> Verdict:
    """Read {"success": bool, "reason": text, "score": 0 to 1 (optional)}; a code fence around all of it is allowed.

    JSON somewhere inside other text is not looked for: it could be a quotation of what the agent wrote.

    Raises:
        MalformedVerdict: it is anything else.
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
    return Verdict(success=success, reason=reason, score=_score(found.get("score"), text))


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Two values for one key are no verdict: which one would count is the parser's whim."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise MalformedVerdict(f"expected every key once, got {[key for key, _ in pairs]!r}")
    return found


def _score(value: object, text: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise MalformedVerdict(f'expected "score" as a number from 0 to 1, got {text[:200]!r}')
    return float(value)
