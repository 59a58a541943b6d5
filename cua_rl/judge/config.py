"""The judge's configuration, one class for people, the run and the judge."""

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

import chz

from cua_rl.command_line.fields import AT_MOST_A_DAY, setting
from cua_rl.host.masking import secret_names
from cua_rl.judge.request import Screenshots
from cua_rl.types.judgement import JudgeVote


@chz.chz
class JudgeConfig:
    """The judge of tasks without a validator, enabled by `judge.model`, and its required precision (docs/judge.md)."""

    mode: Literal["where_needed", "compare"] = setting(
        "where_needed",
        "where_needed: judge only tasks without a validator; compare: judge all tasks, to compare with the "
        "validators, which still decide",
        for_group=True,
    )
    base_url: str | None = setting(
        None,
        "URL of the judge's OpenAI-compatible endpoint, including /v1; its key is read from "
        "JUDGE_API_KEY, never stored",
    )
    model: str | None = setting(
        None, "vision-language model that judges tasks without a validator from screenshots; None disables the judge"
    )
    prompt: str | None = setting(None, "text file with the judge's system prompt; None uses the package's")
    votes: int = setting(1, "votes per rollout, odd; more than half must agree", at_least=1)
    screenshots: Screenshots = setting("final", "screenshots that the judge sees: the last one, or all")
    timeout_s: float = setting(
        60.0, "limit for one vote, including retries after transport errors", within=AT_MOST_A_DAY
    )
    max_retries: int = setting(
        3, "retries after transport errors (no connection, 408, 409, 429, 5xx), never after an answer", by_run=True
    )
    max_concurrent: int = setting(16, "maximum concurrent requests to the judge", at_least=1)
    input_price: float | None = setting(
        None, "price of the judge's prompt tokens, US dollars per million; None records no cost", at_least=0.0
    )
    output_price: float | None = setting(
        None, "price of the judge's answer tokens, US dollars per million; None records no cost", at_least=0.0
    )
    extra: dict[str, object] = setting(
        doc='additional fields of every request to the judge, such as {"temperature": 0.5}', factory=dict[str, object]
    )
    min_precision: float | None = setting(
        None,
        "refuse a judge unless the lower end of the 95 % interval of its calibrated precision is at least this, both "
        "as recorded and with as many failures as successes; None only warns if there is no calibration",
        within=(0.0, 1.0),
    )
    calibration: str | None = setting(
        None, "calibration file from recipes.calibrate_judge; None searches <log_dir>/judge_calibrations"
    )

    prompt_text: str = setting("", "the system prompt", by_run=True)
    grader_text: str = setting("", "the grader that takes the judge's place, as JSON; none if empty", by_run=True)

    @property
    def prompt_sha256(self) -> str:
        return sha256(self.prompt_text.encode()).hexdigest()

    def identity(self) -> dict[str, object]:
        """Everything that a calibration depends on, with 16 hex digits that change with any of it."""
        decisive: dict[str, object] = {
            "model": self.model,
            "prompt_sha256": self.prompt_sha256,
            "num_votes": self.votes,
            "screenshots": self.screenshots,
            "extra": dict(self.extra),
        }
        digest = sha256(json.dumps(list(decisive.values()), sort_keys=True).encode()).hexdigest()
        return decisive | {"fingerprint": digest[:16]}

    @property
    def fingerprint(self) -> str:
        """The digits of `identity`."""
        return str(self.identity()["fingerprint"])

    def cost_usd(self, votes: Sequence[JudgeVote]) -> float | None:
        """Cost of the votes; None if no prices are set."""
        if self.input_price is None or self.output_price is None:
            return None
        num_in, num_out = sum(vote.num_prompt_tokens for vote in votes), sum(vote.num_answer_tokens for vote in votes)
        return (num_in * self.input_price + num_out * self.output_price) / 1e6


_FIELDS_OF_EVERY_REQUEST = frozenset({"model", "messages", "stream", "n"})


def check_judge_settings(judge: JudgeConfig) -> None:
    """Raise `ValueError` for what no judge can work with."""
    if judge.votes % 2 == 0:
        raise ValueError(f"judge.votes: expected an odd number, for majorities, got {judge.votes}; add one")
    pairs = (
        {"base_url": judge.base_url, "model": judge.model},
        {"input_price": judge.input_price, "output_price": judge.output_price},
    )
    for pair in pairs:
        missing = [name for name, value in pair.items() if value is None]
        if len(missing) == 1:
            given = next(name for name in pair if name not in missing)
            raise ValueError(f"judge.{missing[0]}: expected it beside judge.{given}, got none; set both")
    if secrets := secret_names(judge.extra):
        raise ValueError(
            f"judge.extra: expected no secrets, which would be stored with the run, got {secrets[0]!r}; put the "
            "judge's key into JUDGE_API_KEY"
        )
    if taken := _FIELDS_OF_EVERY_REQUEST & set(judge.extra):
        raise ValueError(
            f"judge.extra: expected fields beside those that every request has, got {min(taken)!r}; leave it out"
        )
