"""Requests to a gym server: executions made a few at a time, evaluated, and always ended."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

from cua_rl.environments.device import AgentReport
from cua_rl.environments.gym.fields import Evaluation, Execution, GymTaskRef, parse_evaluation, parse_execution
from cua_rl.types.errors import DeviceError, DeviceServiceError, TaskError
from cua_rl.types.json_values import Json, mapping, parse_json

logger = logging.getLogger(__name__)

_RETRIED = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GymLimits:
    """Timeouts, retries and concurrency of requests to a gym server.

    Some servers answer only one of several creations that run side by side: hence one at a time, a time limit for each,
    and another try.
    """

    max_parallel_creates: int = 1
    create_timeout_s: float = 600.0
    max_create_attempts: int = 3
    create_retry_s: float = 10.0
    """The pause after the first failed creation; after the n-th it is n times that."""
    evaluate_timeout_s: float = 600.0
    max_evaluate_attempts: int = 2
    evaluate_retry_s: float = 1.0
    terminate_timeout_s: float = 60.0
    max_terminate_attempts: int = 3
    terminate_retry_s: float = 2.0


class _Failed(Exception):
    """A failed attempt that may be retried; `is_answered` if the server answered, with an error."""

    def __init__(self, message: str, *, is_answered: bool = False) -> None:
        super().__init__(message)
        self.is_answered = is_answered


class GymClient:
    """One gym server."""

    def __init__(self, base_url: str, limits: GymLimits | None = None) -> None:
        import httpx

        self._limits = limits or GymLimits()
        self._creating = asyncio.Semaphore(self._limits.max_parallel_creates)
        pools = httpx.Limits(max_connections=None, max_keepalive_connections=10)
        timeout = httpx.Timeout(60.0, connect=60.0, pool=None)
        self._http = httpx.AsyncClient(base_url=base_url.rstrip("/"), limits=pools, timeout=timeout, trust_env=False)

    async def create(self, task: GymTaskRef) -> Execution:
        """Make an execution of a task, which holds a device until it is ended; raises `DeviceError` after all tries."""
        path = f"/api/v1/{quote(task.gym_id, safe='')}/tasks/{quote(task.identifier, safe='')}"
        failure = ""
        for attempt in range(self._limits.max_create_attempts):
            if attempt:
                logger.warning("gym task=%s creation failed (%s), trying again", task.identifier, failure)
                await asyncio.sleep(self._limits.create_retry_s * attempt)
            try:
                async with self._creating:
                    answer = await self._post(path, {"options": {}}, self._limits.create_timeout_s)
            except _Failed as failed:
                failure = str(failed)
                continue
            execution = parse_execution(answer)
            if execution is not None:
                return execution
            failure = f"no execution_id in {str(dict(answer))[:300]}"
        raise DeviceError(f"expected an execution of gym task {task.identifier!r}, got none: {failure}")

    async def evaluate(self, task: GymTaskRef, execution: Execution, report: AgentReport) -> tuple[Evaluation, Json]:
        """The server's evaluation, parsed and raw.

        Raises:
            DeviceServiceError: the server cannot be reached, or is overloaded.
            TaskError: the evaluation failed on what it found.
        """
        limits, answer = self._limits, report.answer or ""
        data = {
            "task_completed": True,
            "task_success": bool(report.success_claimed),
            "num_turns": report.num_turns,
            "max_turns": report.max_turns,
            "errors": list(report.errors),
            "result_message": answer,
            "answer": answer,
            "answer_text": answer,
        }
        try:
            verdict = await self._post_repeatedly(
                f"{_execution_path(task, execution)}/evaluate",
                {"execution_data": data, "answer_text": answer},
                timeout_s=limits.evaluate_timeout_s,
                max_attempts=limits.max_evaluate_attempts,
                retry_s=limits.evaluate_retry_s,
            )
        except _Failed as failed:
            raise (TaskError if failed.is_answered else DeviceServiceError)(
                f"expected an evaluation of execution {execution.execution_id!r}, got none: {failed}"
            ) from failed
        except DeviceError as error:
            raise TaskError(str(error)) from error
        evaluation = parse_evaluation(verdict)
        if evaluation is None:
            raise TaskError(f"expected an evaluation of {execution.execution_id!r}, got {str(dict(verdict))[:300]}")
        return evaluation, verdict

    async def terminate(self, task: GymTaskRef, execution: Execution) -> None:
        """End an execution, which frees its device; a failure is only logged."""
        try:
            await self._post_repeatedly(
                f"{_execution_path(task, execution)}/terminate",
                {},
                timeout_s=self._limits.terminate_timeout_s,
                max_attempts=self._limits.max_terminate_attempts,
                retry_s=self._limits.terminate_retry_s,
            )
        except (_Failed, DeviceError) as error:
            logger.error("cannot end gym execution=%s: %s", execution.execution_id, error)

    async def close(self) -> None:
        await self._http.aclose()

    async def _post_repeatedly(
        self, path: str, body: Mapping[str, object], *, timeout_s: float, max_attempts: int, retry_s: float
    ) -> Json:
        """Post until a try succeeds, after longer and longer pauses; raises what the last try raised."""
        for attempt in range(1, max_attempts):
            try:
                return await self._post(path, body, timeout_s)
            except _Failed:
                await asyncio.sleep(retry_s * attempt)
        return await self._post(path, body, timeout_s)

    async def _post(self, path: str, body: Mapping[str, object], timeout_s: float) -> Json:
        """One try; raises `_Failed` if another may succeed and `DeviceError` if the server refuses."""
        import httpx

        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.post(path, json=body, timeout=httpx.Timeout(timeout_s, pool=None))
        except TimeoutError as error:
            raise _Failed(f"no answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise _Failed(f"{type(error).__name__} {error}") from error
        answer = mapping(parse_json(response.content))
        detail = answer.get("detail") or response.text[:300]
        if response.status_code in _RETRIED or response.is_server_error:
            is_answered = response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
            raise _Failed(f"status {response.status_code}: {detail}", is_answered=is_answered)
        if response.is_error:
            raise DeviceError(f"the gym server refused {path} with {response.status_code}: {detail}")
        return answer


def _execution_path(task: GymTaskRef, execution: Execution) -> str:
    return f"/api/v1/{quote(task.gym_id, safe='')}/executions/{quote(execution.execution_id, safe='')}"
