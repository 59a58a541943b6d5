"""The GBox client: connections, error classification and retries."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import gbox_sdk
import httpx
from gbox_sdk import AsyncGboxClient, DefaultAsyncHttpxClient

from cua_rl.types.errors import DeviceError, DeviceLostError, DeviceQuotaError, DeviceServiceError, DeviceTimeoutError

T = TypeVar("T")

MAX_TRIES = 4
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
_CONNECTIONS = httpx.Limits(max_connections=1000, max_keepalive_connections=200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gbox:
    """A client of the API, and the connections below it, which downloads use too."""

    client: AsyncGboxClient
    http: httpx.AsyncClient


def make_gbox(api_key: str | None, base_url: str | None = None) -> Gbox:
    """A client that never retries by itself: a tap that may have been done must not be done twice.

    Without a key, GBOX_API_KEY is read; without an address, GBOX_CLIENT_BASE_URL, then GBox's own.
    """
    http = DefaultAsyncHttpxClient(limits=_CONNECTIONS)
    client = AsyncGboxClient(api_key=api_key, base_url=base_url, max_retries=0, http_client=http)
    return Gbox(client=client, http=http)


@contextmanager
def gbox_errors(doing: str) -> Generator[None]:
    """Turn what the SDK raises into a `DeviceError` of the right kind."""
    try:
        yield
    except gbox_sdk.APITimeoutError as error:
        raise DeviceTimeoutError(f"expected GBox to {doing} in time, got no answer") from error
    except gbox_sdk.APIConnectionError as error:
        raise DeviceServiceError(
            f"expected GBox to {doing}, got no connection ({error.__cause__}); check GBOX_CLIENT_BASE_URL"
        ) from error
    except gbox_sdk.APIStatusError as error:
        raise _status_error(error, doing) from error
    except gbox_sdk.GboxClientError as error:
        raise DeviceError(f"expected GBox to {doing}, got {type(error).__name__}: {error}") from error


def _status_error(error: gbox_sdk.APIStatusError, doing: str) -> DeviceError:
    said = f"expected GBox to {doing}, got status {error.status_code}: {error.message[:300]}"
    match error.status_code:
        case 408 | 504:
            return DeviceTimeoutError(said)
        case 404 | 409 | 410:
            return DeviceLostError(said)
        case 402 | 429:
            return DeviceQuotaError(said, retry_after_s=_retry_after_s(error.response))
        case status if status >= 500:
            return DeviceServiceError(said)
        case 401 | 403:
            return DeviceError(f"{said}; check GBOX_API_KEY")
        case _:
            return DeviceError(said)


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return min(float(response.headers["retry-after"]), LONGEST_PAUSE_S)
    except (KeyError, ValueError):
        return None


async def ask(call: Callable[[], Awaitable[T]], doing: str, *, is_repeatable: bool) -> T:
    """Make a call, again after a pause where that is safe; raises `DeviceError`.

    A refusal for too many requests is always safe to repeat: nothing was done. After a failure of the service or a
    silence only calls that change nothing (`is_repeatable`) are made again.
    """
    for number in range(1, MAX_TRIES):
        try:
            with gbox_errors(doing):
                return await call()
        except DeviceQuotaError as error:
            pause_s = error.retry_after_s
        except (DeviceServiceError, DeviceTimeoutError):
            if not is_repeatable:
                raise
            pause_s = None
        await asyncio.sleep(FIRST_PAUSE_S * 2 ** (number - 1) if pause_s is None else pause_s)
    with gbox_errors(doing):
        return await call()
