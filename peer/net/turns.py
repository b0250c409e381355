"""Whose turn it is: this process reads what others ask of it in turns, so that nobody who asks a lot takes the time of all.

A stream that opens, and each frame of a request, takes a turn. There are so many in a second for an address, and so many for all together.
While they suffice nobody waits. When they do not, addresses take turns, and the peers of an address do. So who asks ten
thousand times waits for itself, and who asks once for one turn of each other address.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from peer.net.guests import Rate
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

Go = Callable[[], None]


class Left:
    """What is left of a rate."""

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: Rate) -> None:
        self._rate, self._left, self._at = rate, rate.burst, float("-inf")

    def seconds(self, now: float) -> float:
        """Until there is something left."""
        if now > self._at:
            self._left = min(self._rate.burst, self._left + (now - max(self._at, now - 1e6)) * self._rate.per_second)
            self._at = now
        return 0.0 if self._left > 0 else (1e-6 - self._left) / self._rate.per_second

    def take(self, amount: float) -> None:
        """May take more than is left: the next one waits for it."""
        self._left -= amount


class Turns:
    """One per transport. `lines`: who waits, by address, then by peer, the next first."""

    def __init__(self, of_an_address: Rate = OF_AN_ADDRESS, together: Rate = TOGETHER) -> None:
        self._of_an_address = of_an_address
        self._whole = Left(together)
        self._left: OrderedDict[str, Left] = OrderedDict()
        self._lines: OrderedDict[str, OrderedDict[str, deque[tuple[float, Go]]]] = OrderedDict()
        self._next: asyncio.Handle | None = None

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(len(line) for peers in self._lines.values() for line in peers.values())

    def at_once(self, peer: str, address: str, now: float, amount: float = 1.0) -> bool:
        """Takes a turn, if it need not be waited for."""
        address = address or peer
        if address in self._lines or self._whole.seconds(now) > 0 or self._of(address).seconds(now) > 0:
            return False
        self._of(address).take(amount)
        self._whole.take(amount)
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

    def _of(self, address: str) -> Left:
        left = self._left.get(address)
        if left is None:
            left = self._left[address] = Left(self._of_an_address)
            if len(self._left) > REMEMBERED:
                self._left.popitem(last=False)
        self._left.move_to_end(address)
        return left

    def _hand_out(self) -> None:
        """One turn to each address that has something left, again and again while there is something left of all."""
        loop = asyncio.get_running_loop()
        now, soonest = loop.time(), 0.0
        self._next = None
        while self._lines:
            waits = self._whole.seconds(now)
            if waits > 0:
                soonest = waits
                break
            dry = {address: self._of(address).seconds(now) for address in self._lines}
            if all(dry.values()):
                soonest = min(dry.values())
                break
            for address in [a for a, seconds in dry.items() if seconds == 0]:
                if self._whole.seconds(now) == 0:
                    self._give(address)
        if self._lines:
            self._next = loop.call_later(max(soonest, 0.001), self._hand_out)

    def _give(self, address: str) -> None:
        peers = self._lines.pop(address)
        peer, line = next(iter(peers.items()))
        amount, go = line.popleft()
        del peers[peer]
        if line:
            peers[peer] = line  # behind the others
        if peers:
            self._lines[address] = peers
        self._of(address).take(amount)
        self._whole.take(amount)
        go()
