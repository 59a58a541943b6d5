"""ASGI middleware for vLLM (`--middleware`) that receives adapters over HTTP and stores them beside the server.

vLLM loads an adapter from a path. If trainer and server share no file system, the run first uploads the two files of an
adapter to the server's address, with the server's key, and removes them after the adapter is unloaded:

    PUT    /cua_rl/adapters/NAME/FILE    stores one of the two files; returns {"path": PATH} for vLLM to load from
    DELETE /cua_rl/adapters/NAME         removes the adapter
    GET    /cua_rl/adapters/NAME         returns the same path if both files are stored, else 404
    GET    /cua_rl/adapters              status 200: the server accepts adapters
"""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from secrets import compare_digest, token_hex
from typing import Any

from cua_rl.sampling.vllm_access import App, Receive, Scope, Send, authorization
from cua_rl.types.errors import DiskFullError, writing

UPLOAD_PATH = "/cua_rl/adapters"
UPLOAD_FOLDER_VARIABLE = "CUA_RL_ADAPTER_FOLDER"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_BYTES = 8 * 2**30
"""Limit for one file; an adapter of rank 256 on a 32B model has 4 GiB in float32."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class AdapterUpload:
    """Stores adapters in `CUA_RL_ADAPTER_FOLDER`, for requests with the key in `VLLM_API_KEY`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._folder = Path(os.environ[UPLOAD_FOLDER_VARIABLE])
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer requests below `/cua_rl/adapters`, and pass the others on."""
        if scope["type"] != "http" or not scope["path"].startswith(UPLOAD_PATH):
            await self._app(scope, receive, send)
            return
        if compare_digest(authorization(scope), self._expected):
            words = scope["path"].removeprefix(UPLOAD_PATH).strip("/").split("/")
            status, body = await self._answer(scope["method"], words, receive)
        else:
            status, body = HTTPStatus.UNAUTHORIZED, {"error": {"message": "Unauthorized"}}
        headers = [(b"content-type", b"application/json")]
        if status != HTTPStatus.OK:  # the rest of the body is not read
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def _answer(self, method: str, words: list[str], receive: Receive) -> tuple[int, Mapping[str, Any]]:
        match method, words:
            case "GET", [""]:
                return HTTPStatus.OK, {}
            case "GET", [name] if _NAME.fullmatch(name) and all(
                (self._folder / name / file).is_file() for file in ADAPTER_FILES
            ):
                return HTTPStatus.OK, {"path": str(self._folder / name)}
            case "DELETE", [name] if _NAME.fullmatch(name):
                await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)
                return HTTPStatus.OK, {}
            case "PUT", [name, file] if _NAME.fullmatch(name) and file in ADAPTER_FILES:
                try:
                    with writing(self._folder):
                        is_stored = await self._store(self._folder / name / file, receive)
                except DiskFullError as error:
                    return HTTPStatus.INSUFFICIENT_STORAGE, {"error": {"message": str(error)}}
                if is_stored:
                    return HTTPStatus.OK, {"path": str(self._folder / name)}
                return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {
                    "error": {"message": f"expected at most {MAX_BYTES} bytes"}
                }
            case _:
                message = f"expected {UPLOAD_PATH}/NAME/FILE with FILE one of {', '.join(ADAPTER_FILES)}"
                return HTTPStatus.NOT_FOUND, {"error": {"message": message}}

    async def _store(self, path: Path, receive: Receive) -> bool:
        """Write the body to `path`, atomically; False if it is too long or ends early."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f"{path.name}.{token_hex(4)}.part")  # the sender may retry concurrently
        num_bytes = 0
        try:
            with part.open("wb") as target:
                while True:
                    event = await receive()
                    chunk: bytes = event.get("body", b"")
                    num_bytes += len(chunk)
                    if event["type"] == "http.disconnect" or num_bytes > MAX_BYTES:
                        return False
                    await asyncio.to_thread(target.write, chunk)
                    if not event.get("more_body"):
                        break
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        return True
