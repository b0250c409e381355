"""What a peer keeps beside its checkpoints, so that its own folder is a model to work with: the run's manifest and tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peer.log import reader
from peer.net.base import Transport, TransportLost
from peer.net.blobs import BlobStore
from peer.net.disk import Disk
from peer.node.open_run import tokenizer_bytes
from peer.ui.text import typed
from protocol.errors import RemoteError, UsageError
from protocol.planning import budget
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.corpus import TOKENIZER
from protocol.run.manifest import Manifest
from protocol.wire import logfile

if TYPE_CHECKING:
    from peer.log import replay
    from peer.node.config import JoinConfig, Machine

_PREFIX = "checkpoint-"


async def keep(
    manifest: Manifest, machine: Machine, transport: Transport, blobs: BlobStore, nodes: Sequence[str]
) -> None:
    """Writes the manifest into the peer's folder, and the tokenizer, if the peer may come to hold the whole model. Where none of the `nodes` gives the
    tokenizer now, it is asked again at the next start. Raises UsageError where the disk refuses."""
    disk, folder = Disk(), machine.config.folder
    disk.write(folder / logfile.MANIFEST, manifest.to_bytes())
    if not budget.holds_whole(manifest, machine.hardware.budget) or _is_the_runs(folder, manifest):
        return
    with contextlib.suppress(RemoteError, TransportLost):
        disk.write(folder / TOKENIZER, await _tokenizer(manifest, machine.config, transport, blobs, nodes))


async def check_document_end(
    manifest: Manifest, machine: Machine, transport: Transport, blobs: BlobStore, nodes: Sequence[str]
) -> None:
    """Whether the tokenizer ends documents as the manifest says, which only runs are asked that look for these ends. Where none of the `nodes` gives the
    tokenizer now, nothing is said. Raises UsageError, TransportLost."""
    if manifest.model.document_end_id >= 0:
        from peer.corpus.tokenizer import check_document_end as check

        with contextlib.suppress(RemoteError):
            raw = await _tokenizer(manifest, machine.config, transport, blobs, nodes)
            await asyncio.to_thread(check, manifest.model, raw)


async def _tokenizer(
    manifest: Manifest, config: JoinConfig, transport: Transport, blobs: BlobStore, nodes: Sequence[str]
) -> bytes:
    """From a file, or one of the `nodes`. Raises UsageError, RemoteError, TransportLost."""
    if _is_the_runs(config.folder, manifest):
        return (config.folder / TOKENIZER).read_bytes()
    raw = tokenizer_bytes(manifest, config.folder, config.corpus)
    return raw if raw is not None else await reader.Remote(transport, nodes, blobs).tokenizer(manifest)


def _is_the_runs(folder: Path, manifest: Manifest) -> bool:
    path = folder / TOKENIZER
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == manifest.tokenizer.digest


@dataclass(frozen=True, slots=True)
class OwnModel:
    """What a peer's folder has of a whole model."""

    manifest: Manifest
    state: replay.State
    tokenizer: bytes


def checkpoints(folder: Path) -> list[Path]:
    """Those of a peer's folder, the newest last; none where it is another folder."""
    if not os.path.isdir(folder) or (folder / logfile.LOG).is_file():
        return []
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def read(folder: Path, round: int | None) -> OwnModel:
    """The newest checkpoint, or that of a round. Raises UsageError where it is not whole, or something else is missing."""
    found = checkpoints(folder)
    rounds = {int(path.name.removeprefix(_PREFIX)): path for path in found if path.name.removeprefix(_PREFIX).isdigit()}
    path = found[-1] if round is None else rounds.get(round)
    if path is None:
        known = ", ".join(map(str, sorted(rounds)))
        raise UsageError(
            f"directory {folder}: has checkpoints of rounds {known}, and none of round {round}; give one of these"
        )
    _require(folder, logfile.MANIFEST, path)
    manifest = manifests.from_bytes((folder / logfile.MANIFEST).read_bytes(), str(folder / logfile.MANIFEST))
    from peer.log import replay

    state = replay.start_from(manifest, path)
    missing = [shard for shard in layout.shard_names(manifest.model) if shard not in state.theta]
    if missing:
        raise UsageError(
            f"directory {folder}: its peer holds a part of the model, without {', '.join(missing[:4])}; give RUN, and every member's"
            " checkpoint by --checkpoint"
        )
    _require(folder, TOKENIZER, path)
    if not _is_the_runs(folder, manifest):
        raise UsageError(f"tokenizer {folder / TOKENIZER}: is another one than the run's; remove it, and join again")
    return OwnModel(manifest, state, (folder / TOKENIZER).read_bytes())


def _require(folder: Path, name: str, checkpoint: Path) -> None:
    if not (folder / name).is_file():
        raise UsageError(
            f"directory {folder}: is a peer's without {name}, which a full replica has after a while in the run; give RUN,"
            f" and {typed('--checkpoint', checkpoint)}"
        )
