"""Clients that get no further, or do not read, are closed; all others are served."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from cua_rl.host.http_server import ConnectionLimits, serve_app
from cua_rl.host.system import raise_descriptor_limit
from tests.patience import patience, slowness

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True)])
async def test_a_server_says_that_other_machines_can_connect(
    host: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_app(Starlette(), host, 0, grace_s=0) as url:
        pass
    assert (f"other machines can connect to {url}" in caplog.text) == is_told


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def forever(request: Request) -> Response:
    async def pieces() -> AsyncGenerator[bytes]:
        while True:
            yield bytes(2**16)
            await asyncio.sleep(0)  # lets the end of the connection be seen

    return StreamingResponse(pieces())


async def silent(request: Request) -> Response:
    async def pieces() -> AsyncGenerator[bytes]:
        yield b"begun"
        await asyncio.Event().wait()

    return StreamingResponse(pieces())


@asynccontextmanager
async def served(limits: ConnectionLimits) -> AsyncGenerator[int]:
    app = Starlette(
        routes=[
            Route("/", hello, methods=["GET", "POST"]),
            Route("/forever", forever),
            Route("/silent", silent, methods=["GET", "POST"]),
        ]
    )
    async with serve_app(app, "127.0.0.1", 0, grace_s=0, limits=limits) as url:
        yield int(url.rpartition(":")[2])


async def ask(port: int, sent: bytes = GET) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection, after what was answered."""
    try:
        while await reader.read(2**16):
            pass
    except ConnectionError:
        pass
    return True


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(bytes(2**16))
        await writer.drain()


QUICK = ConnectionLimits(head_s=0.2, stall_s=0.2, max_waiting=3, burst_s=0.0, max_connections=6)


@pytest.mark.parametrize(
    "sent", [b"", GET[:-4], GET + GET[:20], b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nx"]
)
async def test_a_request_that_is_never_whole_is_closed(sent: bytes) -> None:
    async with served(QUICK) as port:
        reader, writer = await ask(port, sent)
        async with asyncio.timeout(patience(10)):
            assert await is_closed(reader)
        writer.close()


async def test_a_head_that_is_too_long_is_closed_before_its_time_is_up() -> None:
    async with served(ConnectionLimits()) as port:
        reader, writer = await ask(port, GET[:-2])
        for number in range(100):
            writer.write(b"X-%d: %s\r\n" % (number, bytes([97]) * 4000))
        async with asyncio.timeout(ConnectionLimits().head_s / 2):
            assert await is_closed(reader)
        writer.close()


@pytest.mark.parametrize(
    "begun",
    [
        GET.replace(b"/ ", b"/silent ", 1) + b"GET / HTTP/1.1\r\nX: ",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
        b"POST /silent HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    ],
    ids=["ahead of an answer", "after a body", "after a body without an answer"],
)
async def test_endless_headers_are_closed_wherever_they_come(begun: bytes) -> None:
    async with served(ConnectionLimits()) as port:
        reader, writer = await ask(port, begun)
        async with asyncio.timeout(ConnectionLimits().head_s / 2):
            with suppress(ConnectionError):
                for _ in range(100):
                    writer.write(b"a" * 2**16)
                    await writer.drain()
            assert await is_closed(reader)
        writer.close()


async def test_a_large_body_that_nobody_reads_leaves_the_connection_to_the_next_request() -> None:
    async with served(ConnectionLimits()) as port:
        reader, writer = await ask(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % 2**20)
        await reader.readuntil(b"hello")
        writer.write(bytes(2**20) + GET)
        async with asyncio.timeout(patience(10)):
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_client_that_sends_a_refused_body_to_its_end_reads_the_answer() -> None:
    size = 32 * 2**20
    async with served(ConnectionLimits()) as port:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size
        reader, writer = await ask(port, head)
        async with asyncio.timeout(patience(10)):
            for _ in range(size // 2**20):
                writer.write(bytes(2**20))
                await writer.drain()
            assert (await reader.read()).endswith(b"hello")
        writer.close()


async def test_a_refused_body_that_never_ends_is_closed() -> None:
    async with served(QUICK) as port:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % 2**40
        reader, writer = await ask(port, head)
        await reader.readuntil(b"hello")
        async with asyncio.timeout(patience(10)):
            with pytest.raises(ConnectionError):
                await send_for_ever(writer)
        writer.close()


async def test_an_answer_that_is_not_read_is_given_up() -> None:
    async with served(QUICK) as port:
        reader, writer = await ask(port, GET.replace(b"/ ", b"/forever ", 1))
        await reader.read(100)
        while writer.transport.is_reading():  # until this side's buffer is full
            await asyncio.sleep(0.01)
        await asyncio.sleep(4 * QUICK.stall_s)
        async with asyncio.timeout(patience(10)):
            assert await is_closed(reader)  # an endless answer has an end
        writer.close()


async def test_the_oldest_half_open_connections_make_room_for_new_ones() -> None:
    async with served(replace(QUICK, head_s=60.0)) as port:
        half_open = [await ask(port, b"GET") for _ in range(4)]
        async with asyncio.timeout(patience(10)):
            assert await is_closed(half_open[0][0])
        for _ in range(20):
            reader, writer = await ask(port)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
            writer.close()
        assert not half_open[-1][0].at_eof()
        for _, writer in half_open:
            writer.close()


async def test_a_peer_with_too_many_connections_gets_no_more() -> None:
    async with served(replace(QUICK, stall_s=60.0)) as port:
        busy = [await ask(port, GET.replace(b"/ ", b"/forever ", 1)) for _ in range(6)]
        for reader, _ in busy:
            await reader.read(100)
        refused, writer = await ask(port)
        async with asyncio.timeout(patience(10)):
            assert await is_closed(refused)
        for _, other in [*busy, (refused, writer)]:
            other.close()


async def test_too_many_connections_of_all_peers_cost_the_one_with_the_most_that_wait() -> None:
    six = 6.5 / raise_descriptor_limit()
    async with served(replace(QUICK, head_s=60, max_waiting=99, max_connections=99, descriptor_frac=six)) as port:
        many = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(5)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        more = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.3", 0)) for _ in range(2)]
        async with asyncio.timeout(patience(10)):
            assert await is_closed(many[0][0])
            assert await is_closed(many[1][0])
        writer.write(GET)

        assert b"hello" in await reader.readuntil(b"hello")
        for _, open_writer in (*many[2:], *more):
            assert not open_writer.is_closing()


async def test_heads_that_arrive_before_the_first_answer_wait_outside_the_server() -> None:
    """With a parser that reads ahead, 40 MB of them took 3 GB and stopped all else for 9 s."""
    async with served(ConnectionLimits()) as port:
        _, writer = await ask(port)
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                while True:  # nobody reads the answers
                    writer.write(GET * 1000)
                    await writer.drain()
        reader, _ = await ask(port)

        async with asyncio.timeout(patience(5)):
            assert b"hello" in await reader.readuntil(b"hello")
        writer.transport.abort()


async def test_a_connection_accepted_while_the_server_shuts_down_is_closed() -> None:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(served(ConnectionLimits()))
        ending = asyncio.create_task(stack.aclose())
        await asyncio.sleep(0)
        with socket.create_connection(("127.0.0.1", port)) as client:
            time.sleep(0.2)  # noqa: ASYNC251 - so that the server accepts and shuts down in one pass of the event loop
            await ending
            client.setblocking(False)
            with suppress(ConnectionError):
                client.send(GET)
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), patience(5)) == b""


async def test_many_clients_at_once_and_requests_one_after_the_other_are_all_served() -> None:
    limits = ConnectionLimits()
    # on a busy machine they come as slowly as they are served
    limits = replace(limits, head_s=limits.head_s * slowness(), burst_s=limits.burst_s * slowness())
    async with served(limits) as port:
        connections = await asyncio.gather(*(ask(port) for _ in range(600)))
        for _ in range(3):
            for reader, writer in connections:
                assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
                writer.write(GET)
        for _, writer in connections:
            writer.close()
