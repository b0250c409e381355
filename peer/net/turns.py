"""Whose turn it is: this process reads what others ask of it in turns, so that nobody who asks a lot takes the time of all.

A stream that opens, and each frame of a request, takes a turn. There are so many in a second for an address, and so many for all together.
While they suffice nobody waits. When they do not, addresses take turns, and the peers of an address do. So who asks ten
thousand times waits for itself, and who asks once for one turn of each other address.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from peer.net.token_bucket import Rate, TokenBucket, TokenBuckets
from protocol.wire import endpoints

OF_AN_ADDRESS = Rate(500.0, 250.0)
TOGETHER = Rate(2000.0, 1000.0)
"""Turns, of about a third of a millisecond on a slow core each. A newcomer that fetches thousands of payloads takes one for each."""
OPENING = 2.0
"""Turns that a new stream takes."""
UNCOUNTED = frozenset({endpoints.PIPE, endpoints.RELAY, endpoints.BANDWIDTH})
"""Names of streams whose frames take no turns: a chain's, what passes a relay, and what measures a line. Each has bounds of its own."""
REMEMBERED = 4096
"""Addresses of which it is known how much they have left."""

SOME = 1e-6
"""Turns that have to be left: then one may take more, and the next one waits for it."""

Go = Callable[[], None]


class Turns:
    """One per transport. `lines`: who waits, by address, then by peer, the next first."""

    def __init__(self, of_an_address: Rate = OF_AN_ADDRESS, together: Rate = TOGETHER) -> None:
        self._whole = TokenBucket(*together)
        self._left = TokenBuckets(of_an_address, REMEMBERED)
        self._lines: OrderedDict[str, OrderedDict[str, deque[tuple[float, Go]]]] = OrderedDict()
        self._next: asyncio.Handle | None = None

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(len(line) for peers in self._lines.values() for line in peers.values())

    def at_once(self, peer: str, address: str, now: float, amount: float = 1.0) -> bool:
        """Takes a turn, if it need not be waited for."""
        address = address or peer
        if address in self._lines or self._whole.wait(now, SOME) > 0 or self._left.of(address).wait(now, SOME) > 0:
            return False
        self._left.of(address).spend(now, amount)
        self._whole.spend(now, amount)
        return True

    def in_line(self, peer: str, address: str, go: Go, amount: float = 1.0) -> None:
        """Calls `go` when it is this peer's turn."""
        line = self._lines.setdefault(address or peer, OrderedDict()).setdefault(peer, deque())
        line.append((amount, go))
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._hand_out)

    async def take(self, peer: str, address: str, amount: float = 1.0) -> None:
        """Returns when it is this peer's turn."""
        loop = asyncio.get_running_loop()
        if not self.at_once(peer, address, loop.time(), amount):
            came: asyncio.Future[None] = loop.create_future()

            def go() -> None:
                if not came.done():
                    came.set_result(None)

            self.in_line(peer, address, go, amount)
            await came

    def _hand_out(self) -> None:
        """One turn to each address that has something left, again and again while there is something left of all."""
        loop = asyncio.get_running_loop()
        now, soonest = loop.time(), 0.0
        self._next = None
        while self._lines:
            waits = self._whole.wait(now, SOME)
            if waits > 0:
                soonest = waits
                break
            dry = {address: self._left.of(address).wait(now, SOME) for address in self._lines}
            if all(dry.values()):
                soonest = min(dry.values())
                break
            for address in [a for a, seconds in dry.items() if seconds == 0]:
                if self._whole.wait(now, SOME) == 0:
                    self._give(address, now)
        if self._lines:
            self._next = loop.call_later(max(soonest, 0.001), self._hand_out)

    def _give(self, address: str, now: float) -> None:
        peers = self._lines.pop(address)
        peer, line = next(iter(peers.items()))
        amount, go = line.popleft()
        del peers[peer]
        if line:
            peers[peer] = line  # behind the others
        if peers:
            self._lines[address] = peers
        self._left.of(address).spend(now, amount)
        self._whole.spend(now, amount)
        go()
