"""Frames on the Unix socket between rank 0 and its machine: a length of eight bytes (big endian), and a message.

The messages are those of `wire.py`, as `cua_rl.types.codec` writes them. The socket lies in a private folder. Does not
import torch.
"""

import asyncio
import socket
import struct

from cua_rl.training import wire
from cua_rl.types.codec import encode

_LENGTH = struct.Struct(">Q")
_MAX_FRAME_BYTES = 2**40  # far above the largest model with its optimizer; memory is taken as bytes arrive


async def exchange_frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes) -> bytes:
    """Send a request and wait for its answer; raises `OSError` or `EOFError` if the connection breaks."""
    writer.write(_LENGTH.pack(len(payload)))
    writer.write(payload)
    await writer.drain()
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


class WorkerLink:
    """Rank 0's end, blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: wire.Reply) -> None:
        """Write one frame."""
        payload = encode(message, wire.Reply)
        self._connection.sendall(_LENGTH.pack(len(payload)))
        self._connection.sendall(payload)

    def receive(self) -> bytearray:
        """An encoded request, or nothing if the controller has closed the connection."""
        header = self._read(_LENGTH.size)
        return self._read(*_LENGTH.unpack(header)) if header else header

    def _read(self, length: int) -> bytearray:
        if length > _MAX_FRAME_BYTES:
            raise ConnectionError(f"expected a frame of at most {_MAX_FRAME_BYTES} bytes, got one of {length}")
        buffer = bytearray(length)
        view, read = memoryview(buffer), 0
        while read < length:
            count = self._connection.recv_into(view[read:])
            if count == 0:
                return bytearray()
            read += count
        return buffer
