"""Requests of the wire as they are, without the SDK's retries: for order, repetition and what is malformed.

Bodies of `forward_backward` and results of it and of `asample` are the SDK's own protobuf messages.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import httpx
from google.protobuf.message import Message
from tinker.proto.tinker_public_pb2 import ForwardBackwardOutput, ForwardBackwardRequest

from tinker_conformance.expect import CheckFailed, expect

M = TypeVar("M", bound=Message)
Json = Mapping[str, Any]

PROTOBUF = "application/x-protobuf"
PATIENCE_S = 120
"""The first step of a server may compile its kernels."""


@dataclass(frozen=True, kw_only=True)
class WireError(Exception):
    """A request that was refused, or failed: at once by its status, or later as the result of its future."""

    status: int
    """0 if it came as a future's result."""
    message: str
    category: str = ""

    def __str__(self) -> str:
        return f"status {self.status} {self.category} {self.message[:300]!r}"

    @property
    def is_refusal(self) -> bool:
        """Whether the caller is told that the request is wrong, so that the SDK does not send it again."""
        if self.status == 0:
            return self.category == "user"
        return 400 <= self.status < 500 and self.status not in (408, 409, 429)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The HTTP side of a server, with the key of one user."""

    base_url: str
    api_key: str
    sessions: list[str] = field(default_factory=list[str])
    """Ids of the sessions that were opened, for whoever ends them."""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def send(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **body: object
    ) -> httpx.Response:
        """One request below /api/v1."""
        url = f"{self.base_url.rstrip('/')}/api/v1/{path}"
        content = body.get("content")
        return self.client.request(
            method,
            url,
            headers={"X-API-Key": self.api_key, **(headers or {})},
            json=body.get("json"),
            content=content if isinstance(content, bytes) else None,
        )

    def post(self, path: str, body: Json | Message) -> httpx.Response:
        """POST a JSON object, or a message as protobuf."""
        if isinstance(body, Message):
            return self.send("POST", path, headers={"Content-Type": PROTOBUF}, content=body.SerializeToString())
        return self.send("POST", path, json=body)

    def answers(self) -> bool:
        """Whether the server can be asked for its models."""
        try:
            return self.send("GET", "get_server_capabilities").is_success
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Json:
        """A JSON object."""
        return _json_of(self.send("GET", path))

    def call(self, path: str, body: Json | Message) -> Json:
        """POST, for a JSON object that is there at once; a promise's is that of its future."""
        return _json_of(self.post(path, body))

    def submit(self, path: str, body: Json | Message) -> str:
        """The request id of a promise."""
        return text_in(self.call(path, body), "request_id")

    def poll(self, request_id: str) -> httpx.Response:
        """One question for a future's result, which the server may hold back while it waits for it."""
        headers = {"Accept": PROTOBUF, "X-Tinker-Request-Iteration": "0", "X-Tinker-Request-Type": "Any"}
        body = {"request_id": request_id, "allow_metadata_only": False}
        return self.send("POST", "retrieve_future", headers=headers, json=body)

    def wait(self, request_id: str, wait_s: float = PATIENCE_S) -> httpx.Response:
        """The response that has a future's result.

        Raises:
            WireError: the request failed.
        """
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            response = self.poll(request_id)
            if PROTOBUF in response.headers.get("content-type", ""):
                return response
            if response.status_code == 408 or (response.is_success and response.json().get("type") == "try_again"):
                time.sleep(0.05)
                continue
            result = _json_of(response)
            if "error" in result:
                category = str(result.get("category", "")).lower()
                raise WireError(status=0, message=str(result["error"]), category=category)
            return response
        raise CheckFailed(f"expected the result of request {request_id} within {wait_s} s, got none")

    def run(self, path: str, body: Json | Message) -> Json:
        """Send a request with a promise, and wait for its JSON object."""
        return _json_of(self.wait(self.submit(path, body)))

    def message(self, request_id: str, kind: type[M]) -> M:
        """The result of a future that must be protobuf."""
        response = self.wait(request_id)
        got = response.headers.get("content-type", "")
        expect(PROTOBUF in got, f"the result of a request as {PROTOBUF}, which SDKs from 0.25 on demand", got)
        message = kind()
        message.ParseFromString(response.content)
        return message

    def train(self, request: ForwardBackwardRequest) -> ForwardBackwardOutput:
        """One forward_backward."""
        return self.message(self.submit("forward_backward", request), ForwardBackwardOutput)

    def new_session(self) -> str:
        """The id of a session that no SDK keeps alive."""
        body: Json = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        self.sessions.append(text_in(self.call("create_session", body), "session_id"))
        return self.sessions[-1]

    def finish(self, session_id: str) -> None:
        """End a session, which then can give back what it held; servers for SDKs before 0.30 do not know that."""
        self.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})

    def new_model(self, session_id: str, base_model: str, *, model_seq_id: int = 0) -> str:
        """The id of a LoRA model of rank 8."""
        body: Json = {
            "session_id": session_id,
            "model_seq_id": model_seq_id,
            "base_model": base_model,
            "lora_config": {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True},
            "type": "create_model",
        }
        return text_in(self.run("create_model", body), "model_id")

    def expect_refused(self, path: str, body: Json | Message, what: str) -> None:
        """Fail unless the server says at once, and without a stack trace, that the request is wrong."""
        started = time.monotonic()
        try:
            answer = self.call(path, body)
            if isinstance(answer.get("request_id"), str):
                answer = {"result": self.wait(answer["request_id"], 20).text}
        except WireError as error:
            expect(error.is_refusal, f"{what} to be refused with a 4xx or a failure of category 'user'", error)
            expect("Traceback" not in error.message, f"a reason why {what} is refused", error)
            expect(error.message.strip() != "", f"a reason why {what} is refused", "an empty one")
        except httpx.TransportError as error:
            raise CheckFailed(f"expected {what} to be refused, got {type(error).__name__}") from error
        else:
            raise CheckFailed(f"expected {what} to be refused, got {str(answer)[:200]}")
        elapsed_s = time.monotonic() - started
        expect(elapsed_s < 15, f"{what} to be refused at once", f"the refusal after {elapsed_s:.0f} s")


def text_in(body: Json, key: str) -> str:
    """A string that the wire says is there."""
    value = body.get(key)
    expect(isinstance(value, str), f"a string {key!r}", dict(body))
    return str(value)


def _json_of(response: httpx.Response) -> Json:
    if not response.is_success:
        raise WireError(status=response.status_code, message=response.text)
    body: object = response.json()
    expect(isinstance(body, dict), "a JSON object", repr(body)[:200])
    return cast(Json, body)  # the keys of a JSON object are strings
