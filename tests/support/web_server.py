"""A web server that serves the files of a folder over TLS, and misbehaves as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from peer.corpus.mirrors import public_addresses

NAME = "mirror.example"
"""Of every server: manifests name only hosts of the internet."""


async def here(host: str, port: int) -> list[str]:
    """Resolves NAME, for Mirrors; another host is looked up as a peer does it."""
    return ["127.0.0.1"] if host == NAME else [*await public_addresses(host, port)]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: the path, and the bytes [start, end) where only a part of the file is wanted."""

    path: str
    span: tuple[int, int] | None


Behave = Callable[[Request, bytes, asyncio.StreamWriter], Awaitable[None]]
"""Answers a request for something in a file of these bytes."""


def head(status: str, length: int, *lines: str) -> bytes:
    """The beginning of an answer."""
    return "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {length}", *lines, "", "")).encode()


async def honest(request: Request, data: bytes, writer: asyncio.StreamWriter) -> None:
    """As web servers do."""
    if request.span is None:
        writer.write(head("200 OK", len(data)) + data)
        return
    start, end = request.span
    line = f"Content-Range: bytes {start}-{end - 1}/{len(data)}"
    writer.write(head("206 Partial Content", end - start, line) + data[start:end])


@dataclass(slots=True)
class Server:
    """A server for the files in `folder`, under `prefix`. `requests`: what was asked for."""

    folder: Path
    behave: Behave
    prefix: str = "/corpus/"
    port: int = 0
    requests: list[Request] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"https://{NAME}:{self.port}{self.prefix.rstrip('/')}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                span = None
                if "range" in fields:
                    first, last = fields["range"].removeprefix("bytes=").split("-")
                    span = (int(first), int(last) + 1)
                request = Request(lines[0].split()[1], span)
                self.requests.append(request)
                path = self.folder / request.path.removeprefix("/cdn").removeprefix(self.prefix)
                if path.is_file():
                    await self.behave(request, path.read_bytes(), writer)
                else:
                    writer.write(head("404 Not Found", 0))
                await writer.drain()
        if not writer.is_closing():  # closed twice, asyncio's TLS of Python 3.11 forgets what it would have to abort
            writer.close()


@contextlib.asynccontextmanager
async def serving(server: Server, context: ssl.SSLContext) -> AsyncIterator[Server]:
    """The server while it serves; ends every connection in the end."""
    writers: set[asyncio.StreamWriter] = set()
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        task = asyncio.ensure_future(server.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()


def certificate(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(what a server shows, what a client trusts): a certificate for NAME."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), False)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "certificate.pem").write_bytes(pem + secret)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "certificate.pem")
    return server, ssl.create_default_context(cadata=pem.decode())
