"""A vision-language model behind an OpenAI-compatible endpoint that decides whether a task was done."""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from cua_rl.host.processes import is_loopback
from cua_rl.judge.config import JudgeConfig
from cua_rl.judge.request import Case, build_messages
from cua_rl.types.errors import ConfigError, JudgeError, boundary
from cua_rl.types.json_values import mapping
from cua_rl.types.judgement import Judgement, JudgeVote

if TYPE_CHECKING:
    from openai import AsyncOpenAI

DEFAULT_PROMPT = Path(__file__).parent / "prompts" / "judge.txt"
_TRANSPORT_STATUSES = (408, 409, 429)  # and 5xx: the request was fine, the endpoint could not answer it now
CHECK_TIMEOUT_S = 2.0
_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n```", re.DOTALL)
_KEYS = {"success", "reason", "score"}


class Judge:
    """Requests votes from the endpoint; an async context manager. Only it and the request header hold the key."""

    def __init__(self, config: JudgeConfig, api_key: str | None) -> None:
        assert config.base_url is not None, "there is no judge without an endpoint"
        assert config.model is not None, "there is no judge without a model"
        self.config = config
        self._base_url, self._model = config.base_url, config.model
        self._api_key = api_key
        self._client: AsyncOpenAI | None = None
        self.slots = asyncio.Semaphore(config.max_concurrent)

    async def judge(self, case: Case, *, decides: bool) -> Judgement:
        """Collect all votes on an attempt; without a majority, the judgement has no verdict.

        Raises:
            ConfigError: the endpoint rejects the request, and would reject all others for the same reason.
            JudgeError: the attempt has no screenshot.
        """
        config, clock = self.config, time.monotonic()
        messages = build_messages(config.prompt_text, case, config.screenshots)

        async def vote() -> JudgeVote:
            async with self.slots:
                clock = time.monotonic()
                try:
                    answer = await self.ask({"model": self._model, "messages": messages, **config.extra})
                except JudgeError as error:
                    return JudgeVote(success=None, error=self._hide_key(error), duration_s=time.monotonic() - clock)
                return read_vote(answer, time.monotonic() - clock)

        votes = await asyncio.gather(*(vote() for _ in range(config.votes)))
        return Judgement(
            model=self._model,
            prompt=config.prompt_text,
            prompt_sha256=config.prompt_sha256,
            screenshots=config.screenshots,
            votes=tuple(votes),
            decides=decides,
            duration_s=time.monotonic() - clock,
            cost_usd=config.cost_usd(votes),
        )

    async def ask(self, body: Mapping[str, object]) -> object:
        """The endpoint's answer; raises `JudgeError` if there is none, `ConfigError` if it refuses the request."""
        from openai import APIStatusError

        assert self._client is not None, "expected the judge to be entered first"
        where = f"the judge {self._model!r} at {self._base_url}"
        try:
            with boundary(JudgeError, f"asking {where}"):
                async with asyncio.timeout(self.config.timeout_s):
                    return await self._client.post("/chat/completions", cast_to=object, body=body)
        except JudgeError as failed:
            if isinstance(failed.__cause__, TimeoutError):
                raise JudgeError(f"expected {where} to answer within {self.config.timeout_s:g} s, it did not") from None
            status = failed.__cause__
            if (
                isinstance(status, APIStatusError)
                and 400 <= status.status_code < 500
                and status.status_code not in _TRANSPORT_STATUSES
            ):
                raise ConfigError(
                    f"judge.model: expected {where} to accept the request, got {status.status_code} "
                    f"({self._hide_key(status)[:300]}); correct judge.model, judge.base_url, judge.extra or "
                    "JUDGE_API_KEY"
                ) from None
            raise JudgeError(self._hide_key(failed)) from failed

    def _hide_key(self, error: Exception) -> str:
        """The error's message without the key, because endpoints may repeat it and errors are stored."""
        return str(error).replace(self._api_key, "***") if self._api_key else str(error)

    async def check(self, *, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        """Raise `ConfigError` if the endpoint cannot be reached or rejects the key; costs nothing.

        An endpoint that accepts the connection but answers slowly counts as reachable.
        """
        import httpx

        url, headers = self._base_url, {"Authorization": f"Bearer {self._api_key or 'none'}"}
        try:
            async with httpx.AsyncClient(timeout=timeout_s, trust_env=may_use_proxy(url), headers=headers) as client:
                answer = await client.get(f"{url.rstrip('/')}/models")
        except httpx.ReadTimeout:
            return
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"judge.base_url: expected an endpoint that can be reached, got {url!r} ({type(error).__name__} "
                f"{error}); start it, or correct the address"
            ) from None
        if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ConfigError(
                f"JUDGE_API_KEY: expected a key that {url!r} accepts, got {answer.status_code}; put the key into the "
                "environment or .env"
            )

    async def __aenter__(self) -> Self:
        self._client = external_client(
            self._base_url,
            self._api_key or "none",
            max_retries=self.config.max_retries,
            timeout_s=self.config.timeout_s,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._client is not None:
            await self._client.close()


def read_vote(answer: object, duration_s: float) -> JudgeVote:
    """Parse a Chat Completions answer into a vote; it has no verdict if anything about the answer is invalid."""
    reply: Any = answer
    text, num_in, num_out = "", 0, 0
    verdict: Verdict | None = None
    why: str | None = None
    try:
        choice = reply["choices"][0]
        usage: Any = reply.get("usage") or {}
        num_in, num_out = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        content: object = choice["message"]["content"]
        if not isinstance(content, str):
            raise MalformedVerdict(f"expected text as the answer's content, got {content!r:.200}")
        text = content
        if choice.get("finish_reason") == "length":
            raise MalformedVerdict(f"expected a whole answer, got one cut off at the token limit: {text[:200]!r}")
        verdict = parse_verdict(text)
    except MalformedVerdict as error:
        why = str(error)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError):
        why = f"expected a chat completion, got {answer!r:.300}"
    return JudgeVote(
        success=verdict.success if verdict else None,
        reason=verdict.reason if verdict else "",
        score=verdict.score if verdict else None,
        error=why,
        is_malformed=verdict is None,
        text=text,
        duration_s=duration_s,
        num_prompt_tokens=num_in,
        num_answer_tokens=num_out,
    )


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

    JSON inside other text is ignored: it could be a quotation of what the agent wrote. Raises `MalformedVerdict` if the
    answer is anything else.
    """

    def unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
        # of a duplicate key, which value counts would depend on the parser
        found = dict(pairs)
        if len(found) < len(pairs):
            raise MalformedVerdict(f"expected every key once, got {[key for key, _ in pairs]!r}")
        return found

    fenced = _FENCE.fullmatch(text.strip())
    try:
        value: object = json.loads(fenced.group(1) if fenced else text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MalformedVerdict(f"expected one JSON object, got {text[:200]!r} ({error})") from None
    found = mapping(value)
    success, reason = found.get("success"), found.get("reason")
    if not isinstance(success, bool) or not isinstance(reason, str) or not set(found) <= _KEYS:
        raise MalformedVerdict(
            f'expected "success" (true or false), "reason" (text), perhaps "score", nothing else, got {text[:200]!r}'
        )
    score = found.get("score")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1):
        raise MalformedVerdict(f'expected "score" as a number from 0 to 1, got {text[:200]!r}')
    return Verdict(success=success, reason=reason, score=None if score is None else float(score))


def external_client(base_url: str, api_key: str, *, max_retries: int, timeout_s: float) -> "AsyncOpenAI":
    """A client for an OpenAI-compatible endpoint; proxies are only used for endpoints on other machines."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    http_client = DefaultAsyncHttpxClient(trust_env=may_use_proxy(base_url))
    return AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=max_retries, timeout=timeout_s, http_client=http_client
    )


def may_use_proxy(url: str) -> bool:
    """A proxy cannot reach addresses of this machine."""
    return not is_loopback(urlsplit(url).hostname or "")
