"""What counts as a verdict: one JSON object of the right shape, and nothing that only contains one."""

import pytest

from cua_rl.judge.judge import MalformedVerdict, Verdict, parse_verdict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"success": true, "reason": "Wi-Fi is on"}', Verdict(success=True, reason="Wi-Fi is on")),
        (' {"reason": "no", "success": false, "score": 0.25}\n', Verdict(success=False, reason="no", score=0.25)),
        ('```json\n{"success": true, "reason": ""}\n```', Verdict(success=True, reason="")),
        ('```\n{"success": false, "reason": "x", "score": null}\n```', Verdict(success=False, reason="x")),
    ],
)
def test_a_verdict_is_read(text: str, expected: Verdict) -> None:
    assert parse_verdict(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yes",
        "null",
        '[{"success": true, "reason": "x"}]',
        '{"success": "true", "reason": "x"}',
        '{"success": 1, "reason": "x"}',
        '{"success": true}',
        '{"success": true, "reason": "x", "confidence": 1}',
        '{"success": true, "reason": "x", "score": 2}',
        '{"success": true, "reason": "x", "score": true}',
        '{"success": true, "reason": "x", "score": NaN}',
        '{"success": false, "reason": "x", "success": true}',
        'The agent wrote {"success": true, "reason": "x"}',
        '{"success": true, "reason": "x"} {"success": false, "reason": "y"}',
        '```json\n{"success": true, "reason": "x"}\n``` but in fact {"success": false, "reason": "y"}',
        "[" * 100_000,
    ],
)
def test_whatever_is_not_exactly_one_verdict_is_malformed(text: str) -> None:
    with pytest.raises(MalformedVerdict):
        parse_verdict(text)
