"""How a run is found: what RUN names, its manifest and its tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer.net.address import is_circuit, parse, peers_of
from peer.net.base import BadAddress, Transport
from peer.net.blobs import fetch_named
from peer.net.directory import latest_expiry, valid_record
from peer.net.disk import LocalDisk
from protocol.errors import RemoteError, UsageError, apart
from protocol.identity import short_peer
from protocol.rounds.invitations import Ticket, read_ticket
from protocol.run import manifest as manifests
from protocol.run.corpus import TOKENIZER
from protocol.run.manifest import Manifest
from protocol.wire import endpoints

KEY = "identity.key"
_FOUND = "found"
"""In a peer's folder: the id of the run in which it has been."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two tries to find it again."""
ASSETS = Path(__file__).parent.parent / "assets"


REACH_SECONDS = 14.0
"""In which somebody answers, and gives the manifest. Whoever typed a line where nobody does is told so in less than twenty seconds."""
MANIFEST_SECONDS = 4.0
"""For the manifest, at least."""


class NobodyThere(UsageError):
    """Nobody answers where the run should be: what was typed is wrong, or the network is away, or the node."""


@dataclass(frozen=True, slots=True)
class Run:
    """What RUN names: a manifest, if it is known yet, the run id, where bootstrap nodes are, and an invitation, if one is in the line."""

    manifest: Manifest | None
    run_id: str
    bootstrap: tuple[str, ...]
    ticket: Ticket | None = None

    @property
    def dialled(self) -> tuple[str, ...]:
        """The nodes at these addresses."""
        return peers_of(self.bootstrap)


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises UsageError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"manifest {path}: {error.strerror}; give the path of a run's TOML file") from None
    return manifests.from_toml(raw, str(path))


def parse_run(text: str) -> Run:
    """RUN as a person gives it: a file, `ADDRESS#RUN-ID`, or `ADDRESS#RUN-ID#INVITATION`. Raises UsageError."""
    address, mark, rest = text.partition("#")
    run_id, _, invitation = rest.partition("#")
    if "/p2p/" in address and (mark or address.startswith(("/ip", "/dns"))):
        if len(run_id) != 64 or any(c not in "0123456789abcdef" for c in run_id):
            raise UsageError(
                f"RUN {text}: the part after # is not a run id of 64 hexadecimal digits; copy the whole line"
            )
        return Run(None, run_id, (address,), read_ticket(invitation, run_id) if invitation else None)
    if not os.path.exists(text):  # as no path's method, False for what is too long for a name, too
        raise UsageError(
            f"RUN {text}: neither an address nor a file or folder that is here; copy the whole line that a bootstrap node prints, or give a"
            " path that is there"
        )
    manifest = read_manifest(Path(text))
    if not manifest.hints.bootstrap:
        raise UsageError(
            f"manifest {text}: no bootstrap address; put one under [hints] bootstrap, or join with the one-line address"
            " that the bootstrap node prints"
        )
    return Run(manifest, manifest.run_id, manifest.hints.bootstrap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where a transport listens, and how others come to it: `announce` and `relays` are those of peer.net.daemon.Entrance."""

    host: str
    port: int = 0
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()


async def start_transport(folder: Path, door: Door, run: str, *, sparing: bool = False) -> Transport:
    """A hivemind daemon and DHT node of `run` with the key in `folder`, connected to nobody yet. `sparing`: as in peer/net/p2p.py."""
    from peer.net import p2p
    from peer.net.daemon import Entrance

    entrance = Entrance(announce=door.announce, relays=door.relays)
    return await p2p.start(
        folder / KEY,
        host=door.host,
        port=door.port,
        bootstrap=(),
        validate=valid_record(run),
        entrance=entrance,
        latest=latest_expiry(run),
        sparing=sparing,
    )


def read_announced(texts: Sequence[str], port: int, peer: str) -> tuple[str, ...]:
    """What was typed as `--announce`, without our id, which may follow. Raises UsageError."""
    found: list[str] = []
    for text in texts:
        whole = text if "/p2p/" in text else f"{text.rstrip('/')}/p2p/{peer}"
        try:
            address = parse(whole)
        except BadAddress as error:
            raise UsageError(f"--announce: {error}") from None
        if address.peer != peer or is_circuit(whole):
            raise UsageError(
                f"--announce {text}: not an address of this peer ({peer}); give host and port, without /p2p/…"
            )
        found.append(address.dial)
    if found and port == 0:
        raise UsageError("--announce: goes with --port, the port here to which the announced one leads; give that too")
    return tuple(dict.fromkeys(found))


def tokenizer_bytes(manifest: Manifest, beside: Path, corpus: Path | None) -> bytes | None:
    """The run's tokenizer from a file: beside the manifest, shipped, or in the folder of the run's corpus. None where there is none.
    Raises UsageError."""
    name = manifest.tokenizer.file
    places = [beside / name, ASSETS / name] if name else []
    for path in places + ([corpus / TOKENIZER] if corpus is not None else []):
        if path.is_file():
            raw = path.read_bytes()
            found = hashlib.sha256(raw).hexdigest()
            if found != manifest.tokenizer.digest:
                has, wanted = apart(found, manifest.tokenizer.digest)
                raise UsageError(
                    f"tokenizer {path}: its sha256 is {has}, the manifest says {wanted}; use the file that the run was made with"
                )
            return raw
    return None


async def manifest_of(run: Run, transport: Transport) -> Manifest:
    """Connects to the run and gives its manifest, from its file or from the bootstrap node. Raises NobodyThere,
    UsageError, RemoteError."""
    loop = asyncio.get_running_loop()
    end = loop.time() + REACH_SECONDS
    try:
        await transport.connect(run.bootstrap, timeout=REACH_SECONDS)
    except RemoteError as error:
        raise NobodyThere(str(error)) from None
    if run.manifest is not None:
        return run.manifest
    peer = run.dialled[0]
    try:
        async with asyncio.timeout_at(max(end, loop.time() + MANIFEST_SECONDS)):
            raw = await fetch_named(transport, peer, endpoints.MANIFEST_NAME, limit=manifests.MAX_BYTES)
    except TimeoutError:
        raise NobodyThere(
            f"manifest from {short_peer(peer)}: it did not come in {REACH_SECONDS:g} s; try again, or ask who operates the node"
        ) from None
    manifest = manifests.from_bytes(raw, f"from {short_peer(peer)}")
    if manifest.run_id != run.run_id:
        served, wanted = apart(manifest.run_id, run.run_id)
        raise UsageError(f"RUN: the node at {run.bootstrap[0]} serves run {served}, not {wanted}; copy the line again")
    return manifest


async def manifest_again(run: Run, folder: Path, transport: Transport, warn: Callable[[str], None]) -> Manifest:
    """As `manifest_of`, of the peer in `folder`. Where it has been in this run before, what was typed is right: so it waits until somebody
    answers, as after a night without a network in which the machine was started again."""
    mark, pause = folder / _FOUND, FIRST_PAUSE
    while True:
        try:
            manifest = await manifest_of(run, transport)
        except NobodyThere as error:
            if not mark.exists() or mark.read_text() != run.run_id:
                raise
            if pause == FIRST_PAUSE:
                warn(f"{error}; this peer has been in the run before, and tries again until somebody answers")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            await transport.look()
        else:
            LocalDisk().write(mark, run.run_id.encode())
            return manifest
