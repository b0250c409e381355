"""The web server of the tests closes a connection once: TLS of asyncio (Python 3.11.2) cannot abort one that was closed twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.web_server import Request, Server, certificate

DEADLINE = 60.0


class Counting(asyncio.StreamWriter):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


async def closes(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"no HTTP")
    writer.close()


async def leaves_open(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"no HTTP")


def test_a_connection_is_never_closed_twice(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    served, trusted = certificate(tmp_path)

    async def closed(server: Server) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            counting = Counting(
                writer.transport, writer.transport.get_protocol(), reader, asyncio.get_running_loop()
            )  # the same connection
            await server.serve(reader, counting)
            writer.transport.abort()
            done.set_result(counting.closed)

        listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=served)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
            writer.write(b"GET /corpus/file HTTP/1.1\r\n\r\n")
            assert await reader.readexactly(7) == b"no HTTP"
            writer.close()
            return await done

    for behave in (closes, leaves_open):
        assert asyncio.run(asyncio.wait_for(closed(Server(tmp_path, behave)), DEADLINE)) <= 1
