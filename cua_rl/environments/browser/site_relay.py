"""Leads requests into the sites' network: `python site_relay.py SOCKET`. Standard library only.

Anyone who may connect to the Unix socket reaches the loopback port that the head of the request names as the host.
"""

import asyncio
import re
import sys
from contextlib import suppress


async def main(path: str) -> None:
    """Relay until the process is ended."""
    await (await asyncio.start_unix_server(_relay, path)).serve_forever()


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        head = await reader.readuntil(b"\r\n\r\n")
        port = re.search(rb"\r\nhost: *[^\r]*:(\d+)", head, re.IGNORECASE)
        site_reader, site_writer = await asyncio.open_connection("127.0.0.1", int(port[1]) if port else 80)
        site_writer.write(head)
        await asyncio.gather(copy(reader, site_writer), copy(site_reader, writer))
    writer.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write all that comes, then close."""
    with suppress(OSError):
        while piece := await reader.read(2**16):
            writer.write(piece)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
