"""A vision-language model that decides whether a task was done, behind any OpenAI-compatible endpoint."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from cua_rl.errors import ConfigError, JudgeError, boundary
from cua_rl.judge.request import Case, Part, Screenshots, build_messages
from cua_rl.judge.verdict import MalformedVerdict, parse_verdict
from cua_rl.judgement import Judgement, JudgeVote

if TYPE_CHECKING:
    from openai import AsyncOpenAI

DEFAULT_PROMPT = Path(__file__).parent / "prompts" / "judge.txt"
_TRANSPORT_STATUSES = (408, 409, 429)  # and 5xx: the request was fine, the endpoint could not answer it now
CHECK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """Who judges, how it is asked, and what it costs."""

    base_url: str
    """With its `/v1`, or whatever the endpoint has there."""
    model: str
    prompt: str
    num_votes: int = 1
    screenshots: Screenshots = "final"
    timeout_s: float = 60.0
    """Longest wait for one vote, tries after transport faults included."""
    max_retries: int = 3
    """Tries of a vote after transport faults; an answer, whatever it says, is never asked for again."""
    max_concurrent: int = 16
    input_usd_per_mtok: float | None = None
    output_usd_per_mtok: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields set in every request, such as temperature."""

    @property
    def prompt_sha256(self) -> str:
        return sha256(self.prompt.encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with everything a calibration depends on."""
        decisive = [self.model, self.prompt_sha256, self.num_votes, self.screenshots, dict(self.extra)]
        return sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def cost_usd(self, votes: Sequence[JudgeVote]) -> float | None:
        """What the votes cost; None if no prices are set."""
        if self.input_usd_per_mtok is None or self.output_usd_per_mtok is None:
            return None
        num_in, num_out = sum(vote.num_prompt_tokens for vote in votes), sum(vote.num_answer_tokens for vote in votes)
        return (num_in * self.input_usd_per_mtok + num_out * self.output_usd_per_mtok) / 1e6


class Judge:
    """Asks the endpoint for votes; an async context manager. The key is held here and in the request's header only."""

    def __init__(self, config: JudgeConfig, api_key: str | None) -> None:
        self.config = config
        self._api_key = api_key
        self._client: AsyncOpenAI | None = None
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def judge(self, case: Case, *, decides: bool) -> Judgement:
        """All votes on an attempt; the judgement has no verdict if no majority of them agrees.

        Raises:
            ConfigError: the endpoint refuses such requests, so it would refuse all others too.
            JudgeError: there is nothing to judge from.
        """
        config, clock = self.config, time.monotonic()
        messages = build_messages(config.prompt, case, config.screenshots)
        votes = await asyncio.gather(*(self._vote(messages) for _ in range(config.num_votes)))
        return Judgement(
            model=config.model,
            prompt=config.prompt,
            prompt_sha256=config.prompt_sha256,
            screenshots=config.screenshots,
            votes=tuple(votes),
            decides=decides,
            duration_s=time.monotonic() - clock,
            cost_usd=config.cost_usd(votes),
        )

    async def _vote(self, messages: Sequence[Part]) -> JudgeVote:
        async with self._slots:
            clock = time.monotonic()
            try:
                answer = await self._ask({"model": self.config.model, "messages": messages, **self.config.extra})
            except JudgeError as error:
                return JudgeVote(success=None, error=self._hide_key(error), duration_s=time.monotonic() - clock)
            return read_vote(answer, time.monotonic() - clock)

    async def _ask(self, body: Mapping[str, object]) -> object:
        """The endpoint's answer; raises `JudgeError` if there is none, `ConfigError` if it refuses the request."""
        from openai import APIStatusError

        assert self._client is not None, "the judge was not entered"
        where = f"the judge {self.config.model!r} at {self.config.base_url}"
        try:
            with boundary(JudgeError, f"asking {where}"):
                async with asyncio.timeout(self.config.timeout_s):
                    return await self._client.post("/chat/completions", cast_to=object, body=body)
        except JudgeError as failed:
            if isinstance(failed.__cause__, TimeoutError):
                raise JudgeError(f"expected {where} to answer within {self.config.timeout_s:g} s, it did not") from None
            if isinstance(failed.__cause__, APIStatusError) and _is_refusal(failed.__cause__.status_code):
                status = failed.__cause__
                raise ConfigError(
                    f"judge_model: expected {where} to take the request, got {status.status_code} "
                    f"({self._hide_key(status)[:300]}); correct judge_model, judge_base_url, judge_extra or "
                    "JUDGE_API_KEY"
                ) from None
            raise

    def _hide_key(self, error: Exception) -> str:
        """What an error says; endpoints may say the key again, and errors are stored."""
        return str(error).replace(self._api_key, "***") if self._api_key else str(error)

    async def check(self, *, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        """Raise `ConfigError` if the endpoint cannot be reached, or refuses the key; costs nothing.

        One that takes the connection and then is slow to answer is there, if busy.
        """
        import httpx

        url, headers = self.config.base_url, {"Authorization": f"Bearer {self._api_key or 'none'}"}
        try:
            async with httpx.AsyncClient(timeout=timeout_s, trust_env=not is_loopback(url), headers=headers) as client:
                answer = await client.get(f"{url.rstrip('/')}/models")
        except httpx.ReadTimeout:
            return
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"judge_base_url: expected an endpoint that can be reached, got {url!r} ({type(error).__name__} "
                f"{error}); start it, or correct the address"
            ) from None
        if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ConfigError(
                f"JUDGE_API_KEY: expected a key that {url!r} takes, got {answer.status_code}; put the key into the "
                "environment or .env"
            )

    async def __aenter__(self) -> Self:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self._client = AsyncOpenAI(
            base_url=self.config.base_url,
            api_key=self._api_key or "none",
            max_retries=self.config.max_retries,
            timeout=self.config.timeout_s,
            http_client=DefaultAsyncHttpxClient(trust_env=not is_loopback(self.config.base_url)),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()


def read_vote(answer: object, duration_s: float) -> JudgeVote:
    """A Chat Completions answer as a vote; without a verdict if anything about it is not as it must be."""
    reply: Any = answer
    text, num_in, num_out = "", 0, 0
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
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        why = str(error) if isinstance(error, MalformedVerdict) else f"expected a chat completion, got {answer!r:.300}"
        return JudgeVote(
            success=None,
            error=why,
            is_malformed=True,
            text=text,
            duration_s=duration_s,
            num_prompt_tokens=num_in,
            num_answer_tokens=num_out,
        )
    return JudgeVote(
        success=verdict.success,
        reason=verdict.reason,
        score=verdict.score,
        text=text,
        duration_s=duration_s,
        num_prompt_tokens=num_in,
        num_answer_tokens=num_out,
    )


def _is_refusal(status: int) -> bool:
    return 400 <= status < 500 and status not in _TRANSPORT_STATUSES


def is_loopback(url: str) -> bool:
    """True for addresses of this machine, which no proxy can reach."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
