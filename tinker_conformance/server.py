"""The server under test: where it is, how it is started and killed, and a client session on it."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar, cast

import tinker

from tinker_conformance.expect import expect
from tinker_conformance.wire import Wire

C = TypeVar("C")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

START_S = 300
"""A server that loads a model and an inference engine takes minutes."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A Tinker-compatible server."""

    base_url: str
    api_key: str
    model: str
    """Name of a base model that it trains and samples."""
    tolerance: float = 0.02
    """How far log-probabilities of its sampler may be from those of its trainer."""
    serve: str | None = None
    """The command that starts it; None if somebody else has started it."""
    group_file: Path | None = None
    """Holds the process group of the running server: the process of a check starts it anew for the ones after it."""

    sessions: list[str] = field(default_factory=list[str])
    """Opened by the check that runs."""

    def wire(self) -> Wire:
        """Plain HTTP requests, for what the SDK never sends."""
        return Wire(base_url=self.base_url, api_key=self.api_key, sessions=self.sessions)

    def client(self) -> tinker.ServiceClient:
        """A client session of its own."""
        service = tinker.ServiceClient(base_url=self.base_url, api_key=self.api_key)
        self.sessions.append(service.holder.get_session_id())
        return service

    def finish_sessions(self) -> None:
        """End what the check opened."""
        for session_id in self.sessions:
            self.wire().finish(session_id)
        self.sessions.clear()

    def model_of(self, service: tinker.ServiceClient, *, rank: int = 8, seed: int = 1) -> tinker.TrainingClient:
        """A LoRA model of the base model; equal seeds mean equal adapters."""
        return client_of(service.create_lora_training_client(base_model=self.model, rank=rank, seed=seed))

    def new_model(self, *, rank: int = 8, seed: int = 1) -> tinker.TrainingClient:
        """A LoRA model in a session of its own."""
        return self.model_of(self.client(), rank=rank, seed=seed)

    def start(self) -> None:
        """Run the command and wait until the server answers."""
        if self.serve is None or self.group_file is None:
            raise ValueError("expected --serve with the command that starts the server")
        process = subprocess.Popen(shlex.split(self.serve), start_new_session=True)
        self.group_file.write_text(str(process.pid), encoding="ascii")
        deadline = time.monotonic() + START_S
        while not self.wire().answers():
            if process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(
                    f"expected {self.serve!r} to answer at {self.base_url} within {START_S} s; it did not"
                )
            time.sleep(0.2)

    def kill(self) -> None:
        """End the server's process group by SIGKILL."""
        if self.group_file is not None and self.group_file.exists():
            group = int(self.group_file.read_text(encoding="ascii"))
            self.group_file.unlink()
            try:
                os.killpg(group, signal.SIGKILL)
                os.waitpid(group, 0)
            except (ProcessLookupError, ChildProcessError):
                pass  # it has ended, or another check's process started it
        deadline = time.monotonic() + 10
        while self.wire().answers() and time.monotonic() < deadline:
            time.sleep(0.05)

    def restart(self) -> None:
        """Kill it at once and start it again, on the same state."""
        self.kill()
        self.start()


class Pending(Protocol[T_co]):
    """A future of the SDK, or of `concurrent.futures`."""

    def result(self) -> T_co:
        """Wait for what was asked for."""
        ...


def client_of(client: C) -> C:
    """The client itself: newer SDKs give a future of it that also behaves like it."""
    if isinstance(client, tinker.APIFuture):
        return cast(C, client.result())  # pyright cannot know what the future of a client is one of
    return client


def wait(future: Pending[T]) -> T:
    """The result of a request of the SDK; each check has a time limit as a whole."""
    return future.result()


def refusal_of(call: Callable[[], object]) -> Exception | None:
    """How a request was refused; None if it was run.

    Raises:
        CheckFailed: it was refused in a way that makes the SDK send it again.
    """
    try:
        call()
    except tinker.APIStatusError as refusal:
        expect(400 <= refusal.status_code < 500, "a refusal to be a 4xx", refusal.status_code)
        return refusal
    except tinker.RequestFailedError as refusal:
        expect(refusal.category.value.lower() == "user", "a refusal to be of category 'user'", refusal)
        return refusal
    return None
