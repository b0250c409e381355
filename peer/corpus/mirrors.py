"""Mirrors of a corpus: folders on web servers, and data set repositories of the Hugging Face hub.

A mirror has the files of a corpus's folder (docs/guides/data.md) under its address, and is asked for parts of files
(RFC 9110, section 14). Bytes, seconds and redirects of its answers are bounded; only https is spoken.

A manifest names mirrors, so only hosts of the internet are asked, also behind redirects: a name is resolved, its
addresses are checked, and the connection goes to a checked one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import httpx2
from huggingface_hub import hf_hub_url

from peer.net.base import now
from peer.net.blobs import Place
from peer.net.blobs.holders import Corrupt
from peer.net.lru import LruDict
from protocol.codec import blob_hash
from protocol.errors import RemoteError, UsageError, shown
from protocol.run import corpus, hosts

REDIRECTS = 5
SILENT_SECONDS = 10.0
LEAST_BYTES_A_SECOND = 16_384
"""A request may take SILENT_SECONDS, and as long as its bytes take at this rate."""
TOGETHER = 4
"""Ranges that one request brings."""
REQUESTS = 16
"""Whose ranges are kept until they are asked for, of each mirror: 2 MiB,"""
KEPT_SECONDS = 30.0
"""for so long at most: what was wrong may be right then."""
BUSY_SECONDS = (1.0, 600.0)
"""Least and most that a mirror's Retry-After is believed."""


class MirrorBusy(RemoteError):
    """A mirror asks for a pause of `seconds`."""

    def __init__(self, peer: str, message: str, seconds: float) -> None:
        super().__init__(peer, message)
        self.seconds = seconds


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host and port that may be asked. Raises OSError."""


async def public_addresses(host: str, port: int) -> Sequence[str]:
    """The host's addresses on the internet. Raises OSError where it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return only_public(host, [str(address[0]) for *_, address in found])


def only_public(host: str, addresses: Iterable[str]) -> list[str]:
    """Returns a host's public addresses. Raises OSError if it has none."""
    public = [address for address in dict.fromkeys(addresses) if hosts.is_global(address)]
    if not public:
        raise OSError(f"{host[:80]} is no host of the internet but of a local network; it is not asked")
    return public


class _Connections(httpcore2.AsyncNetworkBackend):
    """Connects to the addresses that `resolve` gives, and to no others."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            *others, last = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(shown(error)) from None
        for address in others:
            with contextlib.suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
        return await self._network.connect_tcp(last, port, timeout, local_address, socket_options)


class _HttpTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, verify: ssl.SSLContext | bool, resolve: Resolve) -> None:
        super().__init__()
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=httpx2.create_ssl_context(verify), network_backend=_Connections(resolve)
        )


class Mirrors:
    """The client of all mirrors of a run.

    verify: trusted certificates (default: the system's)
    hub: the hub's address (default: as `huggingface_hub` finds it)
    silence: longest time without an answer, in seconds
    resolve: finds the addresses of a host that may be asked
    """

    def __init__(
        self,
        verify: ssl.SSLContext | None = None,
        hub: str | None = None,
        silence: float = SILENT_SECONDS,
        resolve: Resolve = public_addresses,
    ) -> None:
        self._hub = hub
        self._silence = silence
        self._client = httpx2.AsyncClient(
            transport=_HttpTransport(verify or True, resolve), timeout=silence, headers={"Accept-Encoding": "identity"}
        )

    def all(self, addresses: Sequence[str]) -> list[Mirror]:
        """The mirrors at these addresses. Raises UsageError."""
        return [Mirror(self._client, address, self._hub, self._silence) for address in addresses]

    async def aclose(self) -> None:
        await self._client.aclose()


class Mirror:
    """One mirror; see peer/net/blobs/fetching.py for `read`."""

    def __init__(
        self, client: httpx2.AsyncClient, address: str, hub: str | None = None, silence: float = SILENT_SECONDS
    ) -> None:
        self._hub = hub
        self._silence = silence
        self.name = f"mirror {address}"
        self._client = client
        self._address = address.rstrip("/")
        self._repository = _repository(address)
        self._requests = LruDict[Place, tuple[asyncio.Task[bytes], float]](REQUESTS)  # and when it began

    async def read(self, place: Place) -> bytes:
        """A range, or the leaves of a chunk. Raises RemoteError."""
        if place.index < 0:
            return await self.whole(f"{corpus.CHUNKS}/{place.name}{corpus.LEAVES}", place.length)
        first = dataclasses.replace(place, index=place.index - place.index % TOGETHER)
        request, since = self._requests.get(first, (None, float("-inf")))
        if request is None or now() - since > KEPT_SECONDS or (request.done() and _has_failed(request)):
            request = asyncio.create_task(self._ranges(first))
            request.add_done_callback(_has_failed)
            self._requests[first] = request, now()
        start = (place.index - first.index) * blob_hash.RANGE_BYTES
        return (await asyncio.shield(request))[start : start + place.length]

    async def whole(self, path: str, limit: int) -> bytes:
        """A file of at most `limit` bytes. Raises RemoteError."""
        data = bytearray()
        async with self._deadline(limit), self._get(path, None) as response:
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > limit:
                    raise self._lie(f"sent more than {limit} bytes")
        return bytes(data)

    async def _ranges(self, first: Place) -> bytes:
        """A range, and those behind it that are asked for together with it."""
        last = min(first.index + TOGETHER, blob_hash.count(first.size)) - 1
        start, end = blob_hash.span(first.size, first.index)[0], blob_hash.span(first.size, last)[1]
        data = bytearray()
        async with self._deadline(end - start), self._get(f"{corpus.CHUNKS}/{first.name}", (start, end)) as response:
            async for piece in response.aiter_raw():
                data += piece
                if len(data) >= end - start:
                    return bytes(data[: end - start])
        raise RemoteError(self.name, f"{self.name}: sent less than it was asked for")

    @contextlib.asynccontextmanager
    async def _deadline(self, size: int) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._silence + size / LEAST_BYTES_A_SECOND):
                yield
        except TimeoutError:
            raise RemoteError(self.name, f"{self.name}: too slow") from None
        except httpx2.TimeoutException:
            raise RemoteError(self.name, f"{self.name}: no answer for {self._silence:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, ssl.SSLError, OSError, ValueError) as error:
            reason = shown(error) or type(error).__name__
            raise RemoteError(self.name, f"{self.name}: {reason[:120]}") from None

    @contextlib.asynccontextmanager
    async def _get(self, path: str, span: tuple[int, int] | None) -> AsyncIterator[httpx2.Response]:
        """The answer to a request for a file, or for the bytes `span` of one, behind all redirects."""
        url = self._url(path)
        headers = {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        for _ in range(REDIRECTS + 1):
            if urlsplit(url).scheme != "https":
                raise self._lie("leads to an address that is not https")
            async with self._client.stream("GET", url, headers=headers) as response:
                if not response.has_redirect_location:
                    self._check(response, span)
                    yield response
                    return
                url = str(httpx2.URL(url).join(response.headers["location"]))
        raise self._lie(f"leads to more than {REDIRECTS} other addresses")

    def _url(self, path: str) -> str:
        if self._repository is None:
            return f"{self._address}/{path}"
        repository, revision, folder = self._repository
        return hf_hub_url(repository, f"{folder}{path}", repo_type="dataset", revision=revision, endpoint=self._hub)

    def _check(self, response: httpx2.Response, span: tuple[int, int] | None) -> None:
        """Raises RemoteError unless the answer's head is that of what was asked for."""
        status = response.status_code
        if status in (404, 410):
            raise RemoteError(self.name, f"{self.name}: answers {status}, it does not have it")
        if status in (429, 503):
            seconds = _retry_after(response.headers.get("retry-after", ""))
            if seconds is not None:
                raise MirrorBusy(self.name, f"{self.name}: answers {status}, asks for {seconds:.0f} s of rest", seconds)
        if span is None and status == 200:
            return
        if span is not None and status == 200:
            raise RemoteError(self.name, f"{self.name}: gives no parts of files")
        if span is None or status != 206:
            raise RemoteError(self.name, f"{self.name}: answers {status}")
        told = response.headers.get("content-range", "")
        if not told.startswith(f"bytes {span[0]}-{span[1] - 1}/"):
            raise RemoteError(self.name, f"{self.name}: sends other bytes than it was asked for")

    def _lie(self, text: str) -> Corrupt:
        return Corrupt(self.name, f"{self.name}: {text}")


def _repository(address: str) -> tuple[str, str | None, str] | None:
    """Splits hf://datasets/OWNER/NAME[@REVISION][/FOLDER] into (OWNER/NAME, revision, folder); None: a web address.

    Raises UsageError.
    """
    kind, _, rest = address.partition("://")
    if kind != "hf":
        return None
    parts = rest.strip("/").split("/")
    if len(parts) < 3 or parts[0] != "datasets":
        raise UsageError(
            f"mirror {shown(address)}: not hf://datasets/OWNER/NAME; the manifest's operator must correct it"
        )
    name, _, revision = parts[2].partition("@")
    return f"{parts[1]}/{name}", revision or None, "".join(f"{part}/" for part in parts[3:])


def _has_failed(request: asyncio.Task[bytes]) -> bool:
    return request.cancelled() or request.exception() is not None


def _retry_after(text: str) -> float | None:
    """Returns the seconds, within BUSY_SECONDS, of a Retry-After (RFC 9110, section 10.2.3)."""
    try:
        is_seconds = text.strip().isdecimal()
        seconds = float(text) if is_seconds else email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(seconds, BUSY_SECONDS[0]), BUSY_SECONDS[1])
