"""Checks whether a libp2p host answers at an address before the daemon dials it, and why a host name fails.

libp2p leaves an address alone for longer after each failed dial, so a peer that comes back is not found for minutes. A
plain TCP connection has no such memory, and a live libp2p host sends its greeting at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from peer.net.address import host_of, is_circuit, may_be_dialled, parse, port_of
from peer.net.base import BadAddress, cancel
from protocol.errors import shown

GREETING = b"\x13/multistream/1.0.0\n"
"""What a libp2p host sends first, whoever connects (https://github.com/multiformats/multistream-select)."""
SECONDS = 3.0
"""That a peer has for it; it is asked again while there is time."""
SILENT = "no answer in time"
_REASONS = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "no route to its host",
    errno.ENETUNREACH: "its network cannot be reached",
}


async def why_silent(addresses: Iterable[str], seconds: float) -> str:
    """Returns why no libp2p host greets us at these direct addresses.

    Empty if one does, or where only the daemon can tell.
    """
    tasks = [asyncio.create_task(_why(address, seconds)) for address in addresses]
    reason = SILENT
    try:
        for answer in asyncio.as_completed(tasks):
            if not (reason := await answer):
                break
    finally:
        await cancel(*tasks)
    return reason


async def _why(address: str, seconds: float) -> str:
    try:
        async with asyncio.timeout(seconds):
            return "" if await is_given(host_of(address), port_of(address)) else "no libp2p host"
    except TimeoutError:
        return SILENT
    except socket.gaierror:
        return ""
    except OSError as error:
        return _REASONS.get(error.errno or 0, shown(error))


async def is_given(host: str, port: int) -> bool:
    """Returns whether a libp2p host greets there, without a deadline. Raises OSError if the connection fails."""
    reader, writer = await asyncio.open_connection(host, port, limit=2 * len(GREETING))
    try:
        return await reader.readexactly(len(GREETING)) == GREETING
    except (OSError, EOFError):
        return False
    finally:
        writer.transport.abort()


LOOK_SECONDS = 5.0
_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


Ask = Callable[[str, int], Awaitable[Any]]
"""Looks up the addresses of a name, of one version of IP or of any. Raises socket.gaierror, UnicodeError."""


async def _ask(host: str, family: int) -> Any:
    return await asyncio.get_running_loop().getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)


async def dialable(
    announced: Iterable[str], own: Collection[str], begun: Collection[str], ask: Ask = _ask
) -> list[str]:
    """Returns those of a peer's announced addresses that are dialled on its word (address.may_be_dialled), a host name
    as the IP addresses that it has now. own: our addresses; begun: those that we began with."""
    ours = [host_of(address) for address in own if not is_circuit(address)]
    began = [host_of(address) for address in begun if not is_circuit(address)]
    found: list[str] = []
    for text in announced:
        try:
            dial = parse(text).dial
        except BadAddress:
            found.append(text)  # which the transport does not know, or refuses
            continue
        _, kind, host, _ = dial.split("/", 3)
        hosts = await _hosts(ask, host, _FAMILIES[kind]) if kind in _FAMILIES else [host]
        rest = text.removeprefix(f"/{kind}/{host}/")
        found += [f"/ip{6 if ':' in h else 4}/{h}/{rest}" for h in hosts if may_be_dialled(h, ours, began)]
    return list(dict.fromkeys(found))


async def _hosts(ask: Ask, host: str, family: int) -> list[str]:
    """The IP addresses of a name, none where it is not known."""
    with contextlib.suppress(OSError, UnicodeError, TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS):
            return list(dict.fromkeys(str(info[4][0]) for info in await ask(host, family)))
    return []


async def why_unknown(addresses: Iterable[str], ask: Ask = _ask) -> str:
    """Returns what is wrong with the first host name that fails, empty if none does or the reason is not known."""
    for address in addresses:
        kind, host = address.split("/")[1], host_of(address)
        if kind in _FAMILIES and (error := await _error(ask, host, _FAMILIES[kind])) is not None:
            if error.errno == socket.EAI_AGAIN:
                return f"the name {host} could not be looked up, this machine's network or its DNS does not answer"
            if kind != "dns" and await _error(ask, host, socket.AF_UNSPEC) is None:
                return f"the name {host} has no address of IPv{kind[-1]}"
            return f"the name {host} is not known"
    return ""


async def _error(ask: Ask, host: str, family: int) -> socket.gaierror | None:
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            await ask(host, family)
    except socket.gaierror as error:
        return error
    except (TimeoutError, UnicodeError):
        return socket.gaierror(socket.EAI_AGAIN, "no answer")
    return None
