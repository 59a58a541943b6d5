"""JSON responses that can always be encoded, and error responses in one format."""

import json
import logging
from collections.abc import Sequence
from math import isfinite
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from cua_rl.monitor.databases import NotFoundError
from cua_rl.monitor.pages import CursorError
from cua_rl.monitor.schemas import Problem
from cua_rl.monitor.set_comparison import SetError
from cua_rl.monitor.sql_queries import SqlClosedError, SqlError
from cua_rl.types.errors import DatabaseError
from cua_rl.types.json_values import is_array, is_object

logger = logging.getLogger(__name__)

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 404, 413, 421, 422, 503)
}
"""Error statuses, for the schema of the API."""


class SafeJson(JSONResponse):
    """JSON for anything that a model can sample: lone surrogates are replaced, non-finite numbers are null."""

    def render(self, content: Any) -> bytes:
        try:
            return _dump(content)
        except ValueError:
            return _dump(_clean(content))


def _dump(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_object(value):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if is_array(value) else value


def add_refusals(app: FastAPI) -> None:
    """Map our errors, and an unreachable database, to responses."""
    app.add_exception_handler(NotFoundError, _answer(404))
    app.add_exception_handler(CursorError, _answer(422))
    for refusal in (SetError, SqlError):
        app.add_exception_handler(refusal, _answer(422))
    app.add_exception_handler(SqlClosedError, _answer(409))
    app.add_exception_handler(RequestValidationError, _invalid)
    for kind in (DatabaseError, OperationalError, InterfaceError, PoolTimeoutError):
        app.add_exception_handler(kind, _away)


def _answer(status: int) -> Any:
    async def answer(request: Request, error: Exception) -> SafeJson:
        return SafeJson({"detail": str(error)}, status)

    return answer


async def _invalid(request: Request, error: Exception) -> SafeJson:
    problems: Sequence[Any] = error.errors() if isinstance(error, RequestValidationError) else []
    detail = [{"where": [str(part) for part in item["loc"]], "message": item["msg"]} for item in problems]
    return SafeJson({"detail": detail}, 422)


async def _away(request: Request, error: Exception) -> SafeJson:
    cause = error.orig if isinstance(error, DBAPIError) else error
    logger.warning("database away path=%s: %s", request.url.path, str(cause).strip().split("\n", 1)[0])
    return SafeJson({"detail": "the database does not answer; it is asked again with the next request"}, 503)
