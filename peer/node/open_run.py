"""How a run is found: what RUN names, its manifest and its tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.net import keyfile
from peer.net.address import is_circuit, parse, peers_of
from peer.net.base import BadAddress, OtherPeer, Transport
from peer.net.blobs import fetch_named
from peer.net.directory import latest_expiry, valid_record
from peer.net.disk import Disk
from protocol.errors import RemoteError, UsageError, apart, os_errors
from protocol.identity import SEED_BYTES, Identity, short_peer
from protocol.ledger.access import Ticket, read_ticket
from protocol.run import manifest as manifests
from protocol.run import short_line
from protocol.run.corpus import TOKENIZER
from protocol.run.manifest import Manifest
from protocol.run.short_line import ShortLine
from protocol.wire import endpoints, logfile

KEY = "identity.key"
_FOUND = "found"
"""The file in a peer's or a node's folder with the run's place: `ADDRESS#RUN-ID` a line."""
_LARGEST_FOUND = 64 * 1024
HERE = (Path("potluck-peer"), Path("potluck-bootstrap"))
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
ASSETS = Path(__file__).parent.parent / "assets"

REACH_SECONDS, MANIFEST_SECONDS = 14.0, 4.0
"""To reach the run and get its manifest, and at least for the manifest: a wrong line is reported within 20 seconds."""


class NobodyThere(UsageError):
    """No answer at the run's address: it is wrong, or the network or the node is down."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that RUN names: the manifest, if known, the id, addresses of nodes, and the invitation in the line."""

    manifest: Manifest | None
    run_id: str
    bootstrap: tuple[str, ...]
    ticket: Ticket | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """Its addresses as typed."""
        return tuple(f"{address}#{self.run_id}" for address in self.bootstrap)

    @property
    def dialled(self) -> tuple[str, ...]:
        """The peer ids in its addresses."""
        return peers_of(self.bootstrap)


def read_manifest(path: Path) -> Manifest:
    with os_errors(f"manifest {path}", "give the path of a run's TOML file"):
        raw = path.read_bytes()
    return manifests.from_toml(raw, str(path))


def is_run(text: str) -> bool:
    """Returns whether it names a run, and not a file with text."""
    return "/p2p/" in text or text.endswith(".toml") or os.path.isdir(text) or short_line.parse(text) is not None


def parse_run(text: str) -> Run:
    """RUN as typed: a file, a folder, `ADDRESS#RUN-ID`, or `ADDRESS#RUN-ID#INVITATION`. Raises UsageError."""
    lines = [word for word in text.split() if "/p2p/" in word and "#" in word]
    if len(text.split()) > 1 and len(lines) == 1 and not os.path.exists(text):
        raise UsageError(f"RUN {text}: has other words beside the address; give the address alone: {lines[0]}")
    address, mark, rest = (text.strip() if lines else text).partition("#")
    run_id, _, invitation = rest.partition("#")
    if "/p2p/" in address and (mark or address.startswith(("/ip", "/dns"))):
        if len(run_id) != 64 or any(c not in "0123456789abcdef" for c in run_id):
            raise UsageError(
                f"RUN {text}: the part after # is not a run id of 64 hexadecimal digits; copy the whole line"
            )
        return Run(None, run_id, (address,), read_ticket(invitation, run_id) if invitation else None)
    if not os.path.exists(text):  # unlike a Path's method, False for a name that is too long
        if re.fullmatch(r"[^\s/@]+@[^\s/@]+", text):
            raise UsageError(f"RUN {text}: not the whole line, NAME@HOST#CODE; copy it again, with all after the #")
        raise UsageError(
            f"RUN {text}: neither an address nor a file or folder that is here; copy the whole line that a bootstrap"
            " node prints, or give a path that is there"
        )
    if os.path.isdir(text):
        found = run_in(Path(text))
        if found is None:
            raise UsageError(
                f"directory {text}: is of no peer or node that has been in a run; give the line that a bootstrap node"
                " prints"
            )
        return found
    manifest = read_manifest(Path(text))
    if manifest.hints.bootstrap:
        return Run(manifest, manifest.run_id, manifest.hints.bootstrap)
    for _, known in _near(Path(text), manifest.run_id):
        return Run(manifest, manifest.run_id, known.bootstrap)
    raise UsageError(
        f"manifest {text}: no bootstrap address; start its node here once, put one under [hints] bootstrap, or give the"
        " line that the bootstrap node prints"
    )


async def spelled_out(
    line: ShortLine, folders: Sequence[Path], begin: Callable[..., Awaitable[Transport]] | None = None
) -> str:
    """The address and run id of a short line: from the folder of a peer that has been there before, or else from the
    node, by its key. Raises NobodyThere, UsageError, RemoteError.

    begin: starts a transport (default: `start_transport`)
    """
    for known in filter(None, map(_remembered, folders)):
        for address in known.bootstrap:
            here = parse(address)
            if here.dial == line.dial and short_line.code_of(here.peer, known.run_id) == line.code:
                return f"{address}#{known.run_id}"
    with tempfile.TemporaryDirectory(prefix="potluck-") as name:
        transport = await (begin or start_transport)(Path(name), Door(host="127.0.0.1"), "", sparing=True)
        try:
            address = f"{line.dial}/p2p/{await _answering(transport, line)}"
            manifest = await _fetched_manifest((address,), transport)
        finally:
            await transport.aclose()
    if short_line.code_of(parse(address).peer, manifest.run_id) != line.code:
        raise UsageError(
            f"RUN {line}: is not what is at {line.host} now, which is another run or another operator's node; copy the"
            " whole line again, or ask for a new one"
        )
    if (name := short_line.short_name(manifest.name)) != line.name:
        raise UsageError(f"RUN {line}: the run there is called {name}; if that is the one, type its name")
    return f"{address}#{manifest.run_id}"


async def _answering(transport: Transport, line: ShortLine) -> str:
    """The peer that answers at the line's address, by its key: the daemon dials an id of no peer, and reports the one
    that it found. Raises NobodyThere."""
    nobody = Identity(os.urandom(SEED_BYTES)).peer_id
    try:
        await transport.connect([f"{line.dial}/p2p/{nobody}"], timeout=REACH_SECONDS / 2)
    except OtherPeer as error:
        return error.found
    except RemoteError as error:
        raise NobodyThere(f"RUN {line}: {str(error).replace(f'/p2p/{nobody}', '')}") from None
    raise NobodyThere(f"RUN {line}: no node answers there; check the line, and that the node runs")


# --- folders


def remember(folder: Path, run: Run) -> None:
    """Notes the run's place in the folder of a peer or a node. Raises UsageError."""
    Disk().write(folder / _FOUND, "".join(f"{line}\n" for line in run.lines).encode())


def _remembered(folder: Path) -> Run | None:
    """The run of the peer or the node in `folder`, perhaps without an address; None where it has never been in one."""
    try:
        with open(folder / _FOUND, encoding="utf-8", errors="replace") as file:
            lines = [line.rpartition("#") for line in file.read(_LARGEST_FOUND).splitlines()]
    except OSError:
        return None
    ids = {run_id for _, _, run_id in lines}
    if len(ids) != 1:
        return None
    found: list[str] = []
    for address, _, _ in lines:
        with contextlib.suppress(BadAddress):
            parse(address)
            found.append(address)
    return Run(None, ids.pop(), tuple(found))


def _inner(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def run_in(folder: Path) -> Run | None:
    """The run of the peer or the node in `folder`, or the one run of those in its folders. Raises UsageError for
    several."""
    own = _remembered(folder)
    if own is not None and own.bootstrap:
        return own
    found = [run for inner in _inner(folder) if (run := _remembered(inner)) is not None and run.bootstrap]
    if len({run.run_id for run in found}) > 1:
        raise UsageError(f"directory {folder}: has folders of several runs; give the one of a peer or a node")
    return found[0] if found else None


def _near(manifest: Path, run_id: str) -> list[tuple[Path, Run]]:
    """The folders of the run's peers and nodes beside its manifest, or in the working folder; nodes first."""
    near = dict.fromkeys((*_inner(manifest.parent), *HERE, manifest.parent))
    known = [(folder, run) for folder in near if (run := _remembered(folder)) is not None]
    found = [(folder, run) for folder, run in known if run.run_id == run_id and run.bootstrap]
    return sorted(found, key=lambda one: not _is_nodes(*one))


def _is_nodes(folder: Path, run: Run) -> bool:
    """Returns whether it is a node's: it remembers its own address."""
    with contextlib.suppress(UsageError):
        return (folder / KEY).is_file() and keyfile.load_or_create(folder / KEY).peer_id in run.dialled
    return False


def node_folder(text: str, typed: Path) -> Path:
    """The folder of the operator's node: `typed`, or where that is the default without a key, one near the manifest or
    folder `text`."""
    if (typed / KEY).is_file() or typed not in HERE or not os.path.exists(text):
        return typed
    path = Path(text)
    if path.is_dir():
        inside = [(folder, run) for folder in (path, *_inner(path)) if (run := _remembered(folder)) is not None]
    else:
        inside = _near(path, read_manifest(path).run_id)
    return next((folder for folder, run in inside if _is_nodes(folder, run)), typed)


def here(*folders: Path) -> str:
    """RUN by default: the first of `folders` and HERE with one. Raises UsageError."""
    looked = tuple(dict.fromkeys((*folders, *HERE)))
    for folder in looked:
        known = _remembered(folder)
        if (known is not None and known.bootstrap) or (folder / logfile.LOG).is_file():
            return str(folder)
    places = " or ".join(map(str, looked))
    raise UsageError(
        f"RUN: is missing, and there is no peer or node in {places} that has been in a run; give the line that"
        " a bootstrap node prints, or a folder"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The listening and public addresses of a transport: fields as in peer/net/p2p.py."""

    host: str
    port: int = 0
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()


async def start_transport(folder: Path, door: Door, run: str, *, sparing: bool = False) -> Transport:
    """Starts a hivemind daemon and DHT node of `run` with the key in `folder`. `sparing`: as in peer/net/p2p.py."""
    from peer.net import p2p

    return await p2p.start(
        folder / KEY,
        **asdict(door),
        validate=valid_record(run),
        latest=latest_expiry(run),
        sparing=sparing,
    )


def read_announced(texts: Sequence[str], port: int, peer: str) -> tuple[str, ...]:
    """The addresses of `--announce`, without our id. Raises UsageError."""
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
    """The run's tokenizer from beside the manifest, the package, or the corpus; None where it is in none of them.
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
                    f"tokenizer {path}: its sha256 is {has}, the manifest says {wanted}; use the file that the run"
                    " was made with"
                )
            return raw
    return None


async def manifest_of(run: Run, transport: Transport) -> Manifest:
    """Connects to the run. Returns its manifest, from its file or a node. Raises NobodyThere, UsageError,
    RemoteError."""
    if run.manifest is not None:
        await _connected(run.bootstrap, transport)
        return run.manifest
    manifest = await _fetched_manifest(run.bootstrap, transport)
    if manifest.run_id != run.run_id:
        served, wanted = apart(manifest.run_id, run.run_id)
        raise UsageError(f"RUN: the node at {run.bootstrap[0]} serves run {served}, not {wanted}; copy the line again")
    return manifest


async def _connected(addresses: Sequence[str], transport: Transport) -> None:
    try:
        await transport.connect(addresses, timeout=REACH_SECONDS)
    except RemoteError as error:
        raise NobodyThere(str(error)) from None


async def _fetched_manifest(addresses: Sequence[str], transport: Transport) -> Manifest:
    """The manifest that the node at the first of its addresses serves. Raises as `manifest_of`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + REACH_SECONDS
    await _connected(addresses, transport)
    (peer, *_) = peers_of(addresses)
    try:
        async with asyncio.timeout_at(max(end, loop.time() + MANIFEST_SECONDS)):
            raw = await fetch_named(transport, peer, endpoints.MANIFEST_NAME, limit=manifests.MAX_MANIFEST_BYTES)
    except TimeoutError:
        raise NobodyThere(
            f"manifest from {short_peer(peer)}: it did not come in {REACH_SECONDS:g} s; try again, or ask who operates"
            " the node"
        ) from None
    return manifests.from_bytes(raw, f"from {short_peer(peer)}")


async def manifest_again(run: Run, folder: Path, transport: Transport, warn: Callable[[str], None]) -> Manifest:
    """As `manifest_of`. A peer whose folder has been in this run before waits until a node answers, as after a night
    without a network."""
    before, pause = _remembered(folder), FIRST_PAUSE_SECONDS
    while True:
        try:
            manifest = await manifest_of(run, transport)
        except NobodyThere as error:
            if before is None or before.run_id != run.run_id:
                raise
            if pause == FIRST_PAUSE_SECONDS:
                warn(f"{error}; this peer has been in the run before, and tries again until somebody answers")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            await transport.look()
        else:
            remember(folder, run)
            return manifest
