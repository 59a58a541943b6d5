"""Requests to a gbox-mini-agent server: start a run, fetch its status and events."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

import httpx

from cua_rl.types.errors import AgentError
from cua_rl.types.json_values import Json, is_object, mapping, parse_json, sequence

logger = logging.getLogger(__name__)

_NOT_TAKEN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses that mean that the server has not started the run, so a retry is safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run."""

    status: str
    """running, completed or failed"""
    reason: str

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed")


class MiniAgentClient:
    """One gbox-mini-agent server; an async context manager."""

    def __init__(self, base_url: str, *, timeout_s: float = 30.0, max_attempts: int = 5, retry_s: float = 0.5) -> None:
        self._base_url = base_url.rstrip("/")
        self._max_attempts = max_attempts
        self._retry_s = retry_s
        self._http = httpx.AsyncClient(base_url=self._base_url, timeout=timeout_s, trust_env=False)

    async def start(self, body: Json) -> str:
        """Start a run and return its id; retries only if no run can have been started."""
        failure = ""
        for attempt in range(self._max_attempts):
            await asyncio.sleep(self._retry_s * attempt)
            try:
                response = await self._http.post("/runs", json=body)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = f"{type(error).__name__} {error}"
                continue
            except httpx.HTTPError as error:
                raise AgentError(f"start a run at {self._base_url}: {type(error).__name__} {error}") from error
            run_id = mapping(parse_json(response.content)).get("runId") if response.is_success else None
            if isinstance(run_id, str | int) and not isinstance(run_id, bool):
                return str(run_id)
            failure = f"status {response.status_code}: {response.text[:300]}"
            if response.status_code not in _NOT_TAKEN:
                break
        raise AgentError(f"expected a run at {self._base_url}, got none: {failure}")

    async def status(self, run_id: str) -> RunStatus:
        """The run's status; raises `AgentError` after all attempts."""
        fields = mapping(parse_json((await self._get(f"/runs/{run_id}")).content))
        return RunStatus(status=str(fields.get("status")), reason=str(fields.get("reason") or ""))

    async def events(self, run_id: str, since: str | None) -> Sequence[object]:
        """Events from a time on, inclusive; none if the server has none yet."""
        response = await self._get(f"/runs/{run_id}/events", {} if since is None else {"from": since})
        if response.status_code == HTTPStatus.NOT_FOUND:
            return ()
        body = parse_json(response.content)
        return sequence(body.get("events") if is_object(body) else body)

    async def _get(self, path: str, query: Mapping[str, str] | None = None) -> httpx.Response:
        failure = ""
        for attempt in range(self._max_attempts):
            await asyncio.sleep(self._retry_s * attempt)
            try:
                response = await self._http.get(path, params=query)
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__} {error}"
                continue
            if response.is_success or response.status_code == HTTPStatus.NOT_FOUND:
                return response
            failure = f"status {response.status_code}: {response.text[:300]}"
        raise AgentError(f"expected an answer from {self._base_url}{path}, got none: {failure}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
