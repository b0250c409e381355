"""Why the name in an address leads nowhere: asked of this machine's resolver when the daemon has dialled nothing, since that does not say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable

from peer.net.address import host_of

LOOK_SECONDS = 5.0
"""That the resolver may take."""
_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


Ask = Callable[[str, int], Awaitable[object]]
"""Looks up the addresses of a name, of one version of IP or of any. Raises socket.gaierror, UnicodeError."""


async def _ask(host: str, family: int) -> object:
    return await asyncio.get_running_loop().getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)


async def why_unknown(addresses: Iterable[str], ask: Ask = _ask) -> str:
    """What is wrong with the first name in these addresses that leads nowhere; empty where there is none, or nothing is known of it."""
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
