"""Requests to a gym server: executions made a few at a time, evaluated, and always ended."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from urllib.parse import quote

from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.device import AgentReport
from cua_rl.environments.gym.fields import Evaluation, Execution, GymTaskRef, parse_evaluation, parse_execution
from cua_rl.types.errors import DeviceError, DeviceServiceError, TaskError
from cua_rl.types.json_values import Json, mapping, parse_json

logger = logging.getLogger(__name__)

_RETRIED = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
MAX_CREATES = 3
_CREATE_PAUSE_S, _EVALUATE_PAUSE_S, _TERMINATE_PAUSE_S = 10.0, 1.0, 2.0  # after the n-th failure n times that
_TERMINATE_TIMEOUT_S = 60.0

Sleep = Callable[[float], Awaitable[None]]


class _Failed(Exception):
    """A failed attempt that may be retried; `is_answered` if the server answered, with an error."""

    def __init__(self, message: str, *, is_answered: bool = False) -> None:
        super().__init__(message)
        self.is_answered = is_answered


class GymClient:
    """One gym server.

    Some servers answer only one of several creations that run side by side: hence `gym_parallel_creates`, a time limit
    for each, and another try. `sleep` is awaited before it.
    """

    def __init__(self, base_url: str, settings: DeviceConfig, sleep: Sleep = asyncio.sleep) -> None:
        import httpx

        self._settings = settings
        self._sleep = sleep
        self._creating = asyncio.Semaphore(settings.gym_parallel_creates)
        pools = httpx.Limits(max_connections=None, max_keepalive_connections=10)
        timeout = httpx.Timeout(60.0, connect=60.0, pool=None)
        self._http = httpx.AsyncClient(base_url=base_url.rstrip("/"), limits=pools, timeout=timeout, trust_env=False)

    async def create(self, task: GymTaskRef) -> Execution:
        """Make an execution of a task, which holds a device until it is ended; raises `DeviceError` after all tries."""
        path = f"/api/v1/{quote(task.gym_id, safe='')}/tasks/{quote(task.identifier, safe='')}"
        failure = ""
        for attempt in range(MAX_CREATES):
            if attempt:
                logger.warning("gym task=%s creation failed (%s), trying again", task.identifier, failure)
                await self._sleep(_CREATE_PAUSE_S * attempt)
            try:
                async with self._creating:
                    answer = await self._post(path, {"options": {}}, self._settings.lease_timeout_s)
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
        answer = report.answer or ""
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
                timeout_s=self._settings.validate_timeout_s,
                max_attempts=2,
                pause_s=_EVALUATE_PAUSE_S,
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
                timeout_s=_TERMINATE_TIMEOUT_S,
                max_attempts=3,
                pause_s=_TERMINATE_PAUSE_S,
            )
        except (_Failed, DeviceError) as error:
            logger.error("cannot end gym execution=%s: %s", execution.execution_id, error)

    async def close(self) -> None:
        await self._http.aclose()

    async def _post_repeatedly(
        self, path: str, body: Mapping[str, object], *, timeout_s: float, max_attempts: int, pause_s: float
    ) -> Json:
        """Post until a try succeeds, after longer and longer pauses; raises what the last try raised."""
        for attempt in range(1, max_attempts):
            try:
                return await self._post(path, body, timeout_s)
            except _Failed:
                await self._sleep(pause_s * attempt)
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
