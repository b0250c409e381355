"""Machines of a local network that hold a model together: how they find each other, and know each other.

Rank 0, the peer, listens at one address that its user named. Every other machine connects, and both sides show that
they know the site's secret, by HMAC-SHA256 over a random number of the other side. Then rank 0 gives orders over this
connection (peer/training/device_group.py). Tensors go through gloo or NCCL, which neither encrypt nor authenticate:
the machines of the network are trusted.

    rank 0 to the other    MAGIC, nonce a [32]
    the other to rank 0    u16 length, msgpack: nonce b [32], rank, ranks, run id, device, memory in bytes; mac [32]
    rank 0 to the other    u16 length, text: why it is refused, empty for a welcome; mac [32]
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from dataclasses import dataclass

import msgpack

from protocol.errors import LocalError, UsageError
from protocol.planning.memory import MOST_DEVICES

MAGIC = b"potluck site 1\n"
GREETING_SECONDS = 5.0
"""For all messages of one greeting."""
WAIT_SECONDS = 600.0
"""For all machines of a site, when the peer starts; a lost one is waited for as long."""
_NONCE, _LENGTH = 32, struct.Struct("!H")


@dataclass(frozen=True, slots=True)
class Site:
    """The options --site and --rank.

    secret: known to all machines; empty as typed for rank 0, which has it from its key.
    """

    host: str
    port: int
    secret: str
    rank: int
    ranks: int

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, site: str | None, rank: str | None) -> Site | None:
        """Reads the options; None without both. Raises UsageError."""
        if site is None and rank is None:
            return None
        if site is None or rank is None:
            raise UsageError(
                "site: --site and --rank go together; give both, such as --site 192.168.1.5:7100 --rank 0/2"
            )
        address, _, secret = site.partition("/")
        host, _, port = address.rpartition(":")
        try:
            ip = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            ip = None
        if ip is None or ip.is_unspecified or not (port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
            raise UsageError(
                f"--site {site[:80]}: not an address of one network; write that of rank 0 in the local network, such as"
                " 192.168.1.5:7100"
            )
        if ip.is_global:
            raise UsageError(
                f"--site {site[:80]}: an address of the internet, where tensors would be readable; give one of a local"
                " network"
            )
        number, _, count = rank.partition("/")
        places = [int(word) if word.isdecimal() and len(word) <= 3 else -1 for word in (number, count)]
        if not 0 <= places[0] < places[1] <= MOST_DEVICES or places[1] < 2:
            raise UsageError(
                f"--rank {rank[:20]}: not K/N with 0 <= K < N and 2 <= N <= {MOST_DEVICES}; write 0/2 on the machine"
                " that is the peer, and 1/2 on the other"
            )
        if places[0] and not secret:
            raise UsageError("--site: the secret of the site is missing; copy the line that rank 0 prints")
        return cls(str(ip), int(port), secret, *places)


@dataclass(frozen=True, slots=True)
class Member:
    """A machine that has come. `way`: its connection, for orders."""

    way: socket.socket
    host: str
    device: str
    memory_bytes: int


class Gathering:
    """Rank 0's side: waits for the other ranks of a run. Raises UsageError where the address is not free or not
    here."""

    def __init__(self, site: Site, run_id: str) -> None:
        self.site, self._run_id = site, run_id
        self._there: dict[int, Member] = {}
        try:
            family = socket.AF_INET6 if ":" in site.host else socket.AF_INET
            self._listening = socket.create_server((site.host, site.port), family=family, backlog=MOST_DEVICES)
        except OSError as error:
            raise UsageError(
                f"--site {site.address}: cannot listen there: {error.strerror}; give an address of this machine and a"
                " free port"
            ) from None

    def wait(self, seconds: float) -> list[Member]:
        """Returns the other ranks, in order, once all are there. Raises LocalError after `seconds` or `close`."""
        until = time.monotonic() + seconds
        while missing := [rank for rank in range(1, self.site.ranks) if rank not in self._there]:
            try:
                self._listening.settimeout(1.0)
                way, (host, *_) = self._listening.accept()
            except OSError as error:
                if isinstance(error, TimeoutError) and time.monotonic() < until:
                    continue
                ranks = ", ".join(f"{rank}/{self.site.ranks}" for rank in missing)
                raise LocalError(
                    f"site {self.site.address}: rank {ranks} has not come; start it on its machine with the line that"
                    " this peer printed"
                ) from None
            try:
                rank, device, memory = self._greet(way)
            except (OSError, EOFError, ValueError, TypeError, msgpack.UnpackException):
                way.close()
                continue
            former = self._there.pop(rank, None)
            if former is not None:  # it was started again
                former.way.close()
            self._there[rank] = Member(way, host, device, memory)
        return [self._there[rank] for rank in range(1, self.site.ranks)]

    def take(self, seconds: float) -> list[Member]:
        """As `wait`; the next call waits for new connections."""
        found = self.wait(seconds)
        self._there.clear()
        return found

    def close(self) -> None:
        """Stops listening, and closes the connections that `take` has not returned."""
        self._listening.close()
        for member in self._there.values():
            member.way.close()
        self._there.clear()

    def _greet(self, way: socket.socket) -> tuple[int, str, int]:
        nonce = secrets.token_bytes(_NONCE)
        talk = _Talk(way, self.site.secret)
        way.sendall(MAGIC + nonce)
        body = talk.receive(b"other" + nonce)
        theirs, rank, ranks, run, device, memory = msgpack.unpackb(body)
        why = ""
        if run != self._run_id:
            why = f"it has the run {run[:12]}, the peer has {self._run_id[:12]}; give the same RUN on all machines"
        elif not isinstance(rank, int) or not 0 < rank < self.site.ranks or ranks != self.site.ranks:
            why = f"it is rank {rank}/{ranks}, the site has {self.site.ranks}; give each machine a rank of its own"
        talk.send(why.encode(), b"rank 0" + theirs)
        if why:
            raise ValueError(why)
        _keep_alive(way)
        way.settimeout(None)
        return rank, str(device)[:16], int(memory)


def connect(site: Site, run_id: str, device: str, memory_bytes: int) -> socket.socket:
    """Another rank's side: its connection for orders. Raises UsageError if rank 0 refuses it, or is none; OSError."""
    way = socket.create_connection((site.host, site.port), GREETING_SECONDS)
    try:
        talk, nonce = _Talk(way, site.secret), secrets.token_bytes(_NONCE)
        hello = talk.exactly(len(MAGIC) + _NONCE)
        if not hello.startswith(MAGIC):
            raise UsageError(f"--site {site.address}: no peer of Potluck listens there; give the address of rank 0")
        said = msgpack.packb([nonce, site.rank, site.ranks, run_id, device, memory_bytes])
        talk.send(said, b"other" + hello[len(MAGIC) :])
        why = talk.receive(b"rank 0" + nonce).decode("utf-8", "replace")
        if why:
            raise UsageError(f"--site {site.address}: {why}")
    except (EOFError, ValueError):
        way.close()
        raise UsageError(f"--site {site.address}: the secret is another; copy the line that rank 0 prints") from None
    except BaseException:
        way.close()
        raise
    _keep_alive(way)
    way.settimeout(None)
    return way


class _Talk:
    """Messages of a greeting, within GREETING_SECONDS."""

    def __init__(self, way: socket.socket, secret: str) -> None:
        self._way, self._key = way, secret.encode()
        self._until = time.monotonic() + GREETING_SECONDS
        way.settimeout(GREETING_SECONDS)

    def send(self, body: bytes, bound: bytes) -> None:
        """bound: what the mac covers beside the body."""
        self._way.sendall(_LENGTH.pack(len(body)) + body + self._mac(body, bound))

    def receive(self, bound: bytes) -> bytes:
        """Raises ValueError for a wrong mac, EOFError, OSError."""
        body = self.exactly(_LENGTH.unpack(self.exactly(_LENGTH.size))[0])
        if not hmac.compare_digest(self.exactly(hashlib.sha256().digest_size), self._mac(body, bound)):
            raise ValueError("a wrong mac")
        return body

    def exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            self._way.settimeout(max(0.01, self._until - time.monotonic()))
            read = self._way.recv(size - len(found))
            if not read:
                raise EOFError
            found += read
        return found

    def _mac(self, body: bytes, bound: bytes) -> bytes:
        return hmac.digest(self._key, bound + body, "sha256")


def _keep_alive(way: socket.socket) -> None:
    """Ends the connection two minutes after the other machine was lost."""
    way.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            way.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
