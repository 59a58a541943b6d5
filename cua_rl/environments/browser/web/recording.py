"""Records the responses of web sites, and replays them without a network.

A folder has a HAR file for each recorded rollout, named by its task, seed and rollout, with the bodies beside it, and
`recording.json` with the time at which the clocks of its pages stand: a page that is recorded or replayed has that
time, the same random numbers in every document, and no WebSockets, so that it asks for the same addresses again.

What a server answers depends on what was sent to it before. So an answer is found by the request (method, address,
body) and by all requests before it in its rollout that may have changed something (all but GET, HEAD and OPTIONS). The
n-th such request gets the n-th answer. What was never recorded is not answered.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import cast
from urllib.parse import quote, urldefrag

from cua_rl.types.errors import ConfigError

_CLOCK = "recording.json"
_SAFE = ("GET", "HEAD", "OPTIONS")
_REDIRECTS = (301, 302, 303, 307, 308)
_WITHOUT_BODY = (*_REDIRECTS, 204, 205)
_NOT_REPLAYED = ("connection", "content-encoding", "content-length", "keep-alive", "transfer-encoding")
"""Headers that describe how an answer was sent; bodies are recorded as the page got them."""
_JOINED = {"set-cookie": "\n"}
_BOUNDARY = re.compile(rb"----WebKitFormBoundary\w{16}")
"""Chromium draws another one for every form with files."""

FROZEN = """
(() => {
  const now = %d, Real = Date;
  window.Date = new Proxy(Real, {
    construct: (target, given, made) => Reflect.construct(target, given.length ? given : [now], made),
    apply: () => new Real(now).toString(),
    get: (target, name) => name === 'now' ? () => now : Reflect.get(target, name),
  });
  Real.prototype.constructor = window.Date;
  let drawn = 1;
  Math.random = () => (drawn = drawn * 48271 %% 2147483647) / 2147483647;
  Crypto.prototype.getRandomValues = array => {
    const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
    bytes.forEach((_, place) => { bytes[place] = 256 * Math.random(); });
    return array;
  };
  let open = 0;
  const end = () => { open--; };
  window.__cuaIsBusy = () => open > 0;
  const fetch = window.fetch, send = XMLHttpRequest.prototype.send;
  window.fetch = (...given) => { open++; const told = fetch(...given); told.then(end, end); return told; };
  XMLHttpRequest.prototype.send = function (...given) {
    open++;
    this.addEventListener('loadend', end, { once: true });
    return send.apply(this, given);
  };
  if (window.navigation) window.navigation.addEventListener('navigate', event => {
    if (!event.destination.sameDocument) { open++; setTimeout(end, 500); }
  });
  const hex = length => Array.from({ length }, () => Math.floor(16 * Math.random()).toString(16)).join('');
  Crypto.prototype.randomUUID = () => `${hex(8)}-${hex(4)}-4${hex(3)}-8${hex(3)}-${hex(12)}`;
})();
"""
"""A page for which it is always the same millisecond, with the same random numbers (Park and Miller's generator).

It also knows whether it is busy: on a loaded machine, the browser reports requests later than the page becomes quiet.
"""


Asked = tuple[str, str, str]
"""What a page asks of a server: method, address, digest of the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server sent."""

    status: int
    headers: Mapping[str, str]
    """In small letters; cookies are separated by newlines."""
    body: Path | None
    redirect: str | None
    """Where the page was sent instead."""


_Answers = Mapping[tuple[str, Asked], Sequence[Answer]]
"""By what had been sent to the server before, as a digest, and by the request."""
Recording = Mapping[str, _Answers]
"""The rollouts that a folder holds, by name of the file."""


def asked_of(method: str, url: str, body: bytes | None) -> Asked:
    """A request as a recording knows it, without what differs from one browser to the next."""
    return method, urldefrag(url).url, sha256(_BOUNDARY.sub(b"", body)).hexdigest() if body else ""


def begins_at(recording: Recording, url: str) -> bool:
    """Whether a rollout has begun at this address."""
    return any(("", asked_of("GET", url, None)) in answers for answers in recording.values())


def begin_recording(folder: Path) -> None:
    """Make the folder with the time of its pages, if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), (folder / _CLOCK).open("x") as file:
        json.dump({"time_ms": int(time.time() * 1000)}, file)


def read_clock(folder: Path) -> int:
    """The time of the pages of a recording, in milliseconds since 1970; raises `ConfigError`."""
    try:
        return int(json.loads((folder / _CLOCK).read_text())["time_ms"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"expected a recording with {_CLOCK} in {str(folder)!r}, got {error!r}; make one with record={folder}"
        ) from error


def recording_name(task_id: str, seed: int, rollout_id: str) -> str:
    return f"{quote(task_id, safe='').replace('.', '%2E')}.{seed}.{rollout_id}.har"


@lru_cache(maxsize=8)
def read_recording(folder: Path) -> Recording:
    """All rollouts of a folder; raises `ConfigError`. It is read once: a run that replays does not record."""
    read_clock(folder)
    files = sorted(folder.glob("*.har"))
    if not files:
        raise ConfigError(f"expected recorded rollouts in {str(folder)!r}, got none; make some with record={folder}")
    return {file.name: _read_rollout(file) for file in files}


def _read_rollout(file: Path) -> _Answers:
    try:
        entries = json.loads(file.read_text())["log"]["entries"]
        answers: dict[tuple[str, Asked], list[Answer]] = {}
        past = ""
        for entry in entries:
            asked, answer = _read_request(entry["request"], file.parent), _read_answer(entry["response"], file.parent)
            if answer is not None:
                answers.setdefault((past, asked), []).append(answer)
                past = _after(past, asked)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"expected a HAR file of a recording at {str(file)!r}, got {error!r}; remove it") from error
    return answers


def _read_request(raw: Mapping[str, object], folder: Path) -> Asked:
    sent = cast("Mapping[str, str]", raw.get("postData") or {})
    body = (folder / Path(sent["_file"]).name).read_bytes() if sent.get("_file") else sent.get("text", "").encode()
    return asked_of(cast("str", raw["method"]), cast("str", raw["url"]), body)


def _read_answer(raw: Mapping[str, object], folder: Path) -> Answer | None:
    """What was answered; None if nothing was, as where the page was not allowed to go, or if its body is lost."""
    status, name = cast("int", raw["status"]), cast("Mapping[str, str]", raw["content"]).get("_file")
    if status < 200 or (name is None and status not in _WITHOUT_BODY):
        return None
    headers: dict[str, str] = {}
    for header in cast("Sequence[Mapping[str, str]]", raw["headers"]):
        key, value = header["name"].lower(), header["value"]
        if key not in _NOT_REPLAYED:
            headers[key] = value if key not in headers else f"{headers[key]}{_JOINED.get(key, ', ')}{value}"
    redirect = cast("str", raw.get("redirectURL") or "")
    return Answer(
        status=status,
        headers=headers,
        body=None if name is None else folder / Path(name).name,
        redirect=redirect if redirect and status in _REDIRECTS else None,
    )


def _after(past: str, asked: Asked) -> str:
    """What has been sent to the server after this request."""
    return past if asked[0] in _SAFE else sha256(f"{past} {asked}".encode()).hexdigest()


class Replay:
    """What one page is answered: as in the recorded rollouts of the same task and seed, then of its task, then any."""

    def __init__(self, recording: Recording, task_id: str, seed: int) -> None:
        own = recording_name(task_id, seed, "").split(".")

        def distance(name: str) -> tuple[bool, bool, str]:
            parts = name.split(".")
            return parts[0] != own[0], parts[:2] != own[:2], name

        self._rollouts = [recording[name] for name in sorted(recording, key=distance)]
        self._past = ""
        self._num_asked = Counter[tuple[str, Asked]]()

    def answer(self, asked: Asked) -> Answer | None:
        """The answer to the page's next request; None if no rollout recorded it after what this one has sent."""
        place = (self._past, asked)
        found = next((answers[place] for answers in self._rollouts if place in answers), None)
        if found is None:
            return None
        self._num_asked[place] += 1
        self._past = _after(self._past, asked)
        return found[min(self._num_asked[place], len(found)) - 1]
