"""The short line with which people join a run: `NAME@HOST[:PORT]#CODE`.

HOST and PORT lead to a bootstrap node. CODE is the beginning of a digest of that node's peer id and the run's id, so
that no other host at that address can bend the line to another run. NAME is for people; it is compared with the
manifest's.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import base58

PORT = 31337
"""The port of a line without one; `potluck bootstrap` listens there unless told otherwise."""
CODE_BYTES = 13
"""Of the digest: another key with the same code takes 2^104 tries."""
NAME_CHARACTERS = 16

PATTERN = re.compile(
    r"([a-z0-9-]{1,16})@(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?#([1-9A-HJ-NP-Za-km-z]{16,18})"
)


def code_of(node: str, run_id: str) -> str:
    """The code of a node's peer id and a run, in base58."""
    digest = hashlib.sha256(f"potluck line {node} {run_id}".encode()).digest()
    return base58.b58encode(digest[:CODE_BYTES]).decode()


def short_name(name: str) -> str:
    """A run's name in lower-case ASCII letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:NAME_CHARACTERS].strip("-") or "run"


@dataclass(frozen=True, slots=True)
class ShortLine:
    """host: an IPv4 address, an IPv6 address in brackets, or a name in the DNS."""

    name: str
    host: str
    port: int
    code: str

    def __str__(self) -> str:
        return f"{self.name}@{self.host}{f':{self.port}' * (self.port != PORT)}#{self.code}"

    @property
    def dial(self) -> str:
        """The node's multiaddress without its peer id."""
        if self.host.startswith("["):
            return f"/ip6/{self.host[1:-1]}/tcp/{self.port}"
        kind = "ip4" if re.fullmatch(r"[0-9.]+", self.host) else "dns"
        return f"/{kind}/{self.host}/tcp/{self.port}"


def parse(text: str) -> ShortLine | None:
    """The short line that is `text`; None where it is none."""
    found = PATTERN.fullmatch(text)
    return None if found is None else ShortLine(found[1], found[2], int(found[3] or PORT), found[4])


def short_line(name: str, address: str, run_id: str) -> ShortLine | None:
    """The line of the run `name` for a node's multiaddress; None where it leads through a relay.

    address: `/KIND/HOST/tcp/PORT/p2p/ID`
    """
    parts = address.split("/")
    if len(parts) != 7 or parts[3] != "tcp" or parts[5] != "p2p":
        return None
    host = f"[{parts[2]}]" if parts[1] == "ip6" else parts[2]
    return ShortLine(short_name(name), host, int(parts[4]), code_of(parts[6], run_id))


def join_line(name: str, address: str, run_id: str) -> str:
    """What others give to `potluck join`: the short line, or `ADDRESS#RUN-ID` for an address through a relay."""
    return str(short_line(name, address, run_id) or f"{address}#{run_id}")
