"""The connection between the controller and rank 0: frames on a Unix socket, or authenticated frames over TCP.

A frame is a length of eight bytes (big endian), over TCP an authentication code of 32 bytes, and a message of `wire.py`
as `cua_rl.types.codec` writes it. A Unix socket lies in a private folder. Over TCP, both sides first prove that they
know a token; it also yields the keys of the codes, so without it no one can forge, repeat or reorder frames. They are
not encrypted.

Does not import torch.
"""

import asyncio
import hmac
import ipaddress
import logging
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from cua_rl.training import wire
from cua_rl.types.codec import decode, encode
from cua_rl.types.errors import ConfigError

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "CUA_RL_TRAINER_TOKEN"
_MIN_TOKEN_CHARACTERS = 32  # 128 bits even in hexadecimal digits: a recorded handshake does not reveal it
_LENGTH = struct.Struct(">Q")
_MAX_FRAME_BYTES = 2**40  # far above the largest model with its optimizer; memory is taken as bytes arrive
_NONCE_BYTES = 32
_CODE_BYTES = 32
_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_UNPROVEN = 64  # each has a thread; a controller proves itself within milliseconds
_LOOK_S = 0.05  # how long a proven controller waits for rank 0
_KEEP_ALIVE_S = 30  # between two probes; a peer that misses six is dead; a 30 s outage is tolerated


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where rank 0 listens for a controller on another host."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, name: str) -> Address:
    """An address such as 10.0.0.1:29400; raises `ConfigError` naming the setting if it is malformed or a wildcard."""
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        number = int(port)
    except ValueError:
        address, number = None, 0
    if address is None or address.is_unspecified or not 0 < number < 65536:
        raise ConfigError(
            f"{name}: expected the IP address of one interface and a port, such as 10.0.0.1:29400, got {text!r}; name "
            "the interface of a private network"
        )
    return Address(host=str(address), port=number)


def require_token(environ: Mapping[str, str]) -> str:
    """The token that controller and ranks share; raises `ConfigError` if it is missing or short."""
    token = environ.get(TOKEN_VARIABLE, "")
    if len(token) < _MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE}: expected at least {_MIN_TOKEN_CHARACTERS} random characters, the same for the "
            f"controller and on every node of the trainer, got {len(token)}; make one with `openssl rand -hex 32`"
        )
    return token


def require_reachable(address: str, environ: Mapping[str, str]) -> None:
    """Raises `ConfigError` if the trainer at `trainer.address` could not be reached, or not safely."""
    parse_address(address, "trainer.address")
    require_token(environ)


class Seal:
    """Authentication codes of the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._num_frames = 0

    def code(self, payload: bytes | bytearray) -> bytes:
        """The code of the next frame."""
        code = hmac.new(self._key, struct.pack(">QQ", self._num_frames, len(payload)), "sha256")
        code.update(payload)
        self._num_frames += 1
        return code.digest()

    def check(self, payload: bytes | bytearray, code: bytes | bytearray) -> None:
        """Raises `ConnectionError` unless `code` is that of the next frame."""
        if not hmac.compare_digest(self.code(payload), code):
            raise ConnectionError("expected a frame with its authentication code, got one that was changed on the way")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seals:
    """The seals of a TCP connection: each direction has its own key."""

    controller: Seal
    trainer: Seal


def _prove(token: str, purpose: str, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), purpose.encode() + nonces, "sha256")


def _make_seals(token: str, nonces: bytes) -> Seals:
    return Seals(
        controller=Seal(_prove(token, "frames of the controller", nonces)),
        trainer=Seal(_prove(token, "frames of the trainer", nonces)),
    )


class ControllerLink:
    """The controller's end, on the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: Seals | None = None) -> None:
        self._reader = reader
        self._writer = writer
        self._seals = seals

    @classmethod
    async def connect(cls, address: Address, token: str) -> "ControllerLink":
        """Connect to rank 0 and prove to each other that both know the token.

        Raises:
            OSError: nothing answers there.
            ConfigError: the peer has another token.
        """
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            _keep_alive(writer.get_extra_info("socket"))
            own, nonces = secrets.token_bytes(_NONCE_BYTES), b""
            try:
                nonces = await reader.readexactly(_NONCE_BYTES) + own
                writer.write(own + _prove(token, "controller", nonces))
                is_known = hmac.compare_digest(await reader.readexactly(_CODE_BYTES), _prove(token, "trainer", nonces))
            except asyncio.IncompleteReadError:
                is_known = False
        if not is_known:
            writer.close()
            raise ConfigError(
                f"{TOKEN_VARIABLE}: expected the token of the trainer at {address}, got another one; set the same for "
                "the controller and on every node of the trainer"
            )
        return cls(reader, writer, _make_seals(token, nonces))

    async def ask(self, request: wire.Request) -> wire.Reply:
        """Send a request and wait for its answer; raises `OSError` or `EOFError` if the connection breaks."""
        payload = await asyncio.to_thread(encode, request, wire.Request)
        self._writer.write(_LENGTH.pack(len(payload)))
        if self._seals is not None:
            self._writer.write(await asyncio.to_thread(self._seals.controller.code, payload))
        self._writer.write(payload)
        await self._writer.drain()
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        code = b"" if self._seals is None else await self._reader.readexactly(_CODE_BYTES)
        answer = await self._reader.readexactly(length)
        if self._seals is not None:
            await asyncio.to_thread(self._seals.trainer.check, answer, code)
        return await asyncio.to_thread(decode, answer, wire.Reply)

    def close(self) -> None:
        """End the connection, and with it the worker."""
        self._writer.close()

    def abort(self) -> None:
        """Reset the connection: a live worker learns that this is not the end of the run."""
        with suppress(OSError):  # the socket may be closed already
            no_goodbye = struct.pack("ii", 1, 0)  # do not linger
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_goodbye)
        self._writer.transport.abort()


class WorkerLink:
    """Rank 0's end, blocking."""

    def __init__(self, connection: socket.socket, seals: Seals | None = None) -> None:
        self._connection = connection
        self._seals = seals

    @classmethod
    def accept(
        cls, listener: socket.socket, token: str, handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S
    ) -> "WorkerLink":
        """Wait until a controller that knows the token connects; other connections are refused without delaying it."""
        proven = queue.SimpleQueue[WorkerLink]()
        unproven: dict[socket.socket, None] = {}  # the oldest first

        def shake_hands(connection: socket.socket, peer: object) -> None:
            deadline = time.monotonic() + handshake_timeout_s
            try:
                connection.settimeout(handshake_timeout_s)
                own = secrets.token_bytes(_NONCE_BYTES)
                connection.sendall(own)
                nonces = own + _read_exactly(connection, _NONCE_BYTES, deadline)
                proof = _read_exactly(connection, _CODE_BYTES, deadline)
                if not hmac.compare_digest(proof, _prove(token, "controller", nonces)):
                    raise ConnectionError("it does not know the token")
                connection.sendall(_prove(token, "trainer", nonces))
                connection.settimeout(None)
                _keep_alive(connection)
            except (OSError, EOFError) as error:
                logger.warning("turned away connection peer=%s: %s", peer, error)
                connection.close()
            else:
                proven.put(cls(connection, _make_seals(token, nonces)))
            finally:
                unproven.pop(connection, None)

        listener.settimeout(_LOOK_S)
        while True:
            with suppress(TimeoutError):
                connection, peer = listener.accept()
                # the one that has waited longest makes room, because it is not the controller
                for oldest in list(unproven)[: max(0, len(unproven) + 1 - _MAX_UNPROVEN)]:
                    unproven.pop(oldest, None)
                    with suppress(OSError):  # it has just left
                        oldest.shutdown(socket.SHUT_RDWR)
                unproven[connection] = None
                threading.Thread(target=shake_hands, args=(connection, peer), daemon=True).start()
            with suppress(queue.Empty):
                return proven.get_nowait()

    def send(self, message: wire.Reply) -> None:
        """Write one frame."""
        payload = encode(message, wire.Reply)
        self._connection.sendall(_LENGTH.pack(len(payload)))
        if self._seals is not None:
            self._connection.sendall(self._seals.trainer.code(payload))
        self._connection.sendall(payload)

    def receive(self) -> bytearray:
        """An encoded request; raises `EOFError` if the controller has ended, and `OSError` if the connection broke."""
        (length,) = _LENGTH.unpack(_read_exactly(self._connection, _LENGTH.size))
        code = b"" if self._seals is None else _read_exactly(self._connection, _CODE_BYTES)
        payload = _read_exactly(self._connection, length)
        if self._seals is not None:
            self._seals.controller.check(payload, code)
        return payload

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def _read_exactly(connection: socket.socket, length: int, deadline: float | None = None) -> bytearray:
    """Raises `TimeoutError` after the deadline, even if bytes arrive one by one."""
    if length > _MAX_FRAME_BYTES:
        raise ConnectionError(f"expected a frame of at most {_MAX_FRAME_BYTES} bytes, got one of {length}")
    buffer = bytearray(length)
    view, read = memoryview(buffer), 0
    while read < length:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))  # 0 would mean not to wait at all
        count = connection.recv_into(view[read:])
        if count == 0:
            raise EOFError("the controller closed the connection")
        read += count
    return buffer


def _keep_alive(connection: socket.socket) -> None:
    """Notice the loss of a host that can no longer close its connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # others have other names
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
        # there are no probes while data waits for its receipt, which alone would take a quarter of an hour
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 7 * _KEEP_ALIVE_S * 1000)
