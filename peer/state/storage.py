"""A peer's durable state: the folder of its identity, checkpoints, and the newest offers with their error feedback.

    DIR/lock                          held while a process runs
    DIR/identity.key                  Ed25519, in libp2p's format
    DIR/blobs/                        payloads, our own and others' (peer/net/blobs/store.py)
    DIR/offer-<round>.json            the offer to the round, and the newest round given back before it
    DIR/feedback-<round>.safetensors  error feedback after the round was packed; metadata `given_back`: the newest round
                                      whose offer went back into it; `copy`: the name of its copies in memory,
                                      `number`: of this file, for which they count; notes of hand-overs
    MEMORY/<copy>.safetensors         the same after a later `round`, in memory; survives a killed process
    DIR/handover-<serial>.json        a part of the feedback for another peer, and its .payload, served as a blob
    DIR/checkpoint-<round>/           <shard>.safetensors, optimizer.safetensors, meta.json: digest of each shard

Everything appears by rename after fsync, and the next start removes unfinished files. Tensors are named by position (a
shard's parameters), `shard/position` (feedback) or as the trainer names them. A checkpoint's shards are served as
blobs. Most rounds copy the feedback to memory; every `retention.SAVED_ROUNDS` rounds, and at the end, it is written to
disk (docs/adr/0064-feedback-is-seldom-written.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import functools
import json
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peer.net.base import Clock
from peer.net.blobs import Blob, BlobStore
from peer.net.disk import Disk, disk_error
from peer.state import tensor_file
from protocol.codec import blob_hash
from protocol.codec.topk import Empty, in_memory
from protocol.errors import LocalError, UsageError
from protocol.ledger import part_lists, retention
from protocol.run import layout
from protocol.wire.calls import Handover
from protocol.wire.commit import Part
from protocol.wire.schema import SchemaError, build, plain
from protocol.wire.session import Offer

Shards = dict[str, list[NDArray[np.float32]]]
KEPT = 2
COPIES = 2
GIVEN_BACK, COPY, NUMBER, ROUND = "given_back", "copy", "number", "round"
"""Metadata of a feedback or an offer; see above."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """θ(round) of the shards that were held, and the inner optimizer's state."""

    round: int
    theta: Shards
    optimizer: Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Feedback:
    """The error feedback from disk.

    round: it is of; 0: none.
    offer: the newest, if it may still have to be given back.
    since: offers that this feedback does not contain, oldest first.
    given_back: rounds of those that are to go back into it.
    newest_back: the newest round whose offer went back.
    """

    round: int
    feedback: Shards
    offer: Offer | None
    since: tuple[Offer, ...] = ()
    given_back: frozenset[int] = frozenset()
    newest_back: int = 0


def _names(offer: Offer) -> set[str]:
    """Returns the names of an offer's payloads and of their list."""
    return {part_lists.root_of(offer.parts), *(part.digest for part in offer.parts)}


class Storage:
    """A peer's folder, for one process at a time. Raises UsageError where the disk refuses.

    limit: bytes for payloads.
    empty: makes the arrays of θ and the feedback, in files if `in_files`.
    notes: metadata of the next `save_feedback`, and of the last one.
    offers: those on disk, oldest first, whose payloads are needed.
    free_memory: gives the bytes for a copy of the feedback.
    saved_round: of the feedback on disk; 0: there is none.
    """

    def __init__(self, folder: Path, limit: int | None = None, disk: Disk | None = None) -> None:
        self.folder = folder
        self.disk: Disk = disk or Disk()
        self._lock = self.disk.lock(folder, "potluck process")
        for name in self.disk.names(folder):
            if name.startswith((".checkpoint-", ".feedback-", ".offer-", ".handover-")):
                self.disk.remove(folder / name)
        self.blobs = BlobStore(folder / "blobs", limit, self.disk)
        self.empty: Empty = in_memory
        self.in_files = False
        self.notes: dict[str, str] = {}
        self.offers: list[Offer] = []
        self.free_memory: Callable[[], int] = lambda: sys.maxsize
        self.saved_round = 0
        self._returned: set[int] = set()  # rounds whose offers went back into the feedback
        self._copy, self._number = "", 0
        self._handovers: dict[str, Blob] = {}
        self._kept = self._read_index()

    def close(self) -> None:
        """Lets another process use the folder."""
        self._lock.close()

    def use_files(self) -> None:
        """`empty` makes arrays in files of the folder (peer/net/disk.py), and raises UsageError where it is full."""
        self.empty, self.in_files = functools.partial(self.disk.arrays, self.folder), True

    # --- error feedback and offers

    def save_offer(self, offer: Offer, given_back: int = 0) -> None:
        """Makes an offer durable. `given_back`: the newest round whose offer went back into the feedback."""
        self.offers.append(offer)
        self._returned.add(given_back)
        said = {**plain(offer), GIVEN_BACK: given_back}
        self.disk.write(self.folder / f"offer-{offer.round:08d}.json", json.dumps(said).encode())

    def own_payload(self, offer: Offer, part: Part) -> bytes:
        """A payload of our offer. Raises LocalError."""
        payload = self.blobs.get(part.digest)
        if payload is None:
            raise LocalError(
                f"payload {part.digest[:12]} of round {offer.round}: its file in {self.blobs.folder} is gone or"
                f" damaged; that much of this machine's work is lost, remove {self.folder}/offer-* and start again"
            )
        return payload

    def save_feedback(self, round: int, feedback: Shards, given_back: int = 0) -> None:
        """Makes the feedback of `round` durable; `given_back` as for `save_offer`."""
        path = self.folder / f"feedback-{round:08d}.safetensors"
        before = [old for _, old in self._numbered("feedback-*.safetensors") if old != path]
        self._copy, self._number = self._copy or secrets.token_hex(16), self._number + 1
        self._returned.add(given_back)
        pieces = tensor_file.pieces(_flatten(feedback), self._metadata(given_back))
        self.disk.write(path, *pieces, over=before[0] if len(before) >= KEPT else None)
        self.saved_round = round
        if (folder := self.disk.memory(0)) is not None:
            self.disk.remove(folder / f"{self._copy}.safetensors")
        self._forget_offers(self._numbered("feedback-*.safetensors")[0][0])

    def _forget_offers(self, before: int) -> None:
        """Removes the offers of earlier rounds, and the payloads of those that went back into the feedback."""
        for offer in [o for o in self.offers[:-1] if o.round < before]:
            self.offers.remove(offer)
            self.disk.remove(self.folder / f"offer-{offer.round:08d}.json")
            if offer.round in self._returned:
                for name in _names(offer).difference(*map(_names, self.offers)):
                    self.blobs.protected.discard(name)
                    self.blobs.remove(name)

    def copy_feedback(self, round: int, feedback: Shards, given_back: int = 0) -> bool:
        """Copies the feedback to memory for the next process. False where there is no room."""
        size = COPIES * sum(array.nbytes for arrays in feedback.values() for array in arrays)
        folder = self.disk.memory(size) if self._copy and self.free_memory() >= size else None
        if folder is None:
            return False
        pieces = tensor_file.pieces(_flatten(feedback), {**self._metadata(given_back), ROUND: str(round)})
        with contextlib.suppress(UsageError):  # the room may be gone
            self.disk.write(folder / f"{self._copy}.safetensors", *pieces, sync=False)
            return True
        return False

    def _metadata(self, given_back: int) -> dict[str, str]:
        return {**self.notes, GIVEN_BACK: str(given_back), COPY: self._copy, NUMBER: str(self._number)}

    def load_feedback(self) -> Feedback:
        """The newest readable feedback, and the offers since then."""
        round, feedback, notes = 0, Shards(), dict[str, str]()
        for saved, path in reversed(self._numbered("feedback-*.safetensors")):
            with contextlib.suppress(OSError, tensor_file.Damaged):
                tensors, notes = tensor_file.read(self.disk, path, self.empty)
                round = self.saved_round = saved
                feedback = _unflatten(tensors)
                break
        round, feedback, notes = self._load_copy(notes) or (round, feedback, notes)
        known, self._copy = int(notes.pop(GIVEN_BACK, 0)), notes.pop(COPY, "")
        self._number = int(notes.pop(NUMBER, 0))
        self.notes = notes
        self.offers, backs = self._load_offers()
        self._returned = {known, *backs}
        given_back = frozenset(back for back in backs if back > known)
        newest = self.offers[-1] if self.offers else None
        if newest is not None and (newest.round < round or newest.round in self._returned):
            newest = None
        since = tuple(offer for offer in self.offers if offer.round > round or offer.round in given_back)
        return Feedback(round, feedback, newest, since, given_back, max(self._returned))

    def _load_copy(self, notes: Mapping[str, str]) -> tuple[int, Shards, dict[str, str]] | None:
        """The later copy in memory of the feedback on disk with these notes, if there is one."""
        folder, name = self.disk.memory(0), f"{notes.get(COPY, '')}.safetensors"
        if folder is None or COPY not in notes:
            return None
        for torn in fnmatch.filter(self.disk.names(folder), f".{name}.*"):
            self.disk.remove(folder / torn)
        with contextlib.suppress(OSError, tensor_file.Damaged, KeyError, ValueError):
            tensors, newer = tensor_file.read(self.disk, folder / name, self.empty)
            if newer[NUMBER] == notes[NUMBER]:
                return int(newer.pop(ROUND)), _unflatten(tensors), newer
        return None

    def _load_offers(self) -> tuple[list[Offer], set[int]]:
        offers, backs = list[Offer](), set[int]()
        for _, path in self._numbered("offer-*.json"):
            with contextlib.suppress(OSError, ValueError, SchemaError):
                said = json.loads(self.disk.read(path))
                backs.add(int(said.pop(GIVEN_BACK, 0)))
                offers.append(build(Offer, said))
        return offers, backs

    def forget_older_feedback(self) -> None:
        """Removes all but the newest feedback: a part of it goes elsewhere."""
        *older, newest = self._numbered("feedback-*.safetensors")
        for _, path in older:
            self.disk.remove(path)
        self._forget_offers(newest[0])

    def save_handover(self, handover: Handover, payload: bytes | None = None) -> None:
        """Makes a hand-over, or its progress, durable; serves its payload as a blob."""
        record, data = self._handover(handover.serial)
        if payload is not None:
            self.disk.write(data, payload)
        self.disk.write(record, json.dumps(plain(handover)).encode())
        self._handovers[handover.blob] = Blob(self.disk, data, 0, handover.size)

    def load_handovers(self) -> list[Handover]:
        """The readable ones, oldest first."""
        found = []
        for _, path in self._numbered("handover-*.json"):
            with contextlib.suppress(OSError, ValueError, SchemaError):
                found.append(handover := build(Handover, json.loads(self.disk.read(path))))
                self._handovers[handover.blob] = Blob(self.disk, self._handover(handover.serial)[1], 0, handover.size)
        return found

    def read_handover(self, handover: Handover) -> bytes:
        """Its payload. Raises OSError."""
        return self.disk.read(self._handover(handover.serial)[1])

    def drop_handover(self, handover: Handover) -> None:
        """Forgets a hand-over and its payload."""
        self._handovers.pop(handover.blob, None)
        for path in self._handover(handover.serial):
            self.disk.remove(path)
        self.disk.sync(self.folder)

    def _handover(self, serial: int) -> tuple[Path, Path]:
        name = f"handover-{serial:08d}"
        return self.folder / f"{name}.json", self.folder / f"{name}.payload"

    # --- checkpoints

    def save_checkpoint(self, checkpoint: Checkpoint, digests: Mapping[str, str]) -> None:
        """Writes a whole checkpoint, or none; `digests`: of its shards."""
        final = self.folder / f"checkpoint-{checkpoint.round:08d}"
        if checkpoint.round in self._kept and set(self._kept[checkpoint.round]) >= set(digests):
            return
        temporary = self.folder / f".{final.name}"
        meta = {"round": checkpoint.round, "digests": dict(digests)}
        try:
            self.disk.make_folder(temporary)
            for shard, arrays in checkpoint.theta.items():
                tensors = {f"{i:02}": a for i, a in enumerate(arrays)}
                self.disk.write(temporary / f"{shard}.safetensors", *tensor_file.pieces(tensors))
            self.disk.write(temporary / "optimizer.safetensors", *tensor_file.pieces(checkpoint.optimizer))
            self.disk.write(temporary / "meta.json", json.dumps(meta).encode())
            self.disk.remove(final)  # there is one only if a shard of it is damaged
            self.disk.rename(temporary, final)
            self.disk.sync(self.folder)
        except (OSError, UsageError) as error:
            with contextlib.suppress(OSError):
                self.disk.remove(temporary)
            raise (disk_error(self.folder, error) if isinstance(error, OSError) else error) from None
        self._kept[checkpoint.round] = self._blobs_of(final, digests)
        for round, path in self._numbered("checkpoint-*")[:-KEPT]:
            self._kept.pop(round, None)
            self.disk.remove(path)

    def load_checkpoint(self, warn: Callable[[str], None] = lambda text: None) -> Checkpoint | None:
        """The newest checkpoint with a readable shard. Leaves out damaged shards, which are built as any others that
        are not held."""
        for round, path in reversed(self._numbered("checkpoint-*")):
            kept = self._kept.get(round, {})
            theta = {}
            for shard in list(kept):
                arrays = self.load_shard(round, shard, kept[shard][0])
                if arrays is None:
                    del kept[shard]
                    warn(
                        f"file {path / shard}.safetensors: damaged; this shard is built again from the others and"
                        " the log"
                    )
                else:
                    theta[shard] = arrays
            if not theta:
                warn(f"directory {path}: no shard of this checkpoint can be read; an older one is taken, or the log")
                continue
            try:
                optimizer, _ = tensor_file.read(self.disk, path / "optimizer.safetensors")
            except (OSError, tensor_file.Damaged):
                warn(f"file {path / 'optimizer.safetensors'}: damaged; the optimizer starts afresh")
                optimizer = {}
            return Checkpoint(round, theta, optimizer)
        return None

    def load_shard(self, round: int, shard: str, digest: str) -> list[NDArray[np.float32]] | None:
        """A shard of a checkpoint; None where it has another digest, or is not there."""
        try:
            arrays = _load(self.disk, self.folder / f"checkpoint-{round:08d}", shard, self.empty)
        except (OSError, tensor_file.Damaged):
            return None
        return arrays if layout.shard_digest(arrays) == digest else None

    def states(self) -> dict[int, dict[str, str]]:
        """Round -> shard -> digest of all checkpoints."""
        return {round: {shard: name for shard, (name, _) in kept.items()} for round, kept in self._kept.items()}

    def find(self, name: str) -> Blob | None:
        """The bytes of a checkpoint's shard with this digest, or of a hand-over's payload."""
        if name in self._handovers:
            return self._handovers[name]
        for kept in self._kept.values():
            for digest, blob in kept.values():
                if digest == name:
                    return blob
        return None

    def _blobs_of(self, path: Path, digests: Mapping[str, str]) -> dict[str, tuple[str, Blob]]:
        """Shard -> digest and place of its bytes: the end of its file (peer/state/tensor_file.py)."""
        found = {}
        for shard, digest in digests.items():
            file = path / f"{shard}.safetensors"
            with contextlib.suppress(OSError):
                start = 8 + int.from_bytes(self.disk.read(file, 0, 8), "little")
                size, _ = self.disk.stat(file)
                found[shard] = (digest, Blob(self.disk, file, start, max(0, size - start)))
        return found

    def _read_index(self) -> dict[int, dict[str, tuple[str, Blob]]]:
        kept = {}
        for round, path in self._numbered("checkpoint-*"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                digests = json.loads(self.disk.read(path / "meta.json"))["digests"]
                if all(blob_hash.is_name(digest) for digest in digests.values()):
                    kept[round] = self._blobs_of(path, digests)
        return kept

    def _numbered(self, pattern: str) -> list[tuple[int, Path]]:
        """(round, path), oldest first."""
        found = []
        for name in fnmatch.filter(self.disk.names(self.folder), pattern):
            number = name.split("-")[1].split(".")[0]
            if number.isdecimal():
                found.append((int(number), self.folder / name))
        return sorted(found)


def read_theta(checkpoint: Path, empty: Empty = in_memory) -> tuple[int, Shards]:
    """Round and θ of any peer's checkpoint. Raises UsageError."""
    try:
        meta = json.loads((checkpoint / "meta.json").read_text())
        return int(meta["round"]), {shard: _load(Disk(), checkpoint, shard, empty) for shard in meta["digests"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"checkpoint {checkpoint}: cannot be read ({type(error).__name__}); give a folder checkpoint-… of a peer"
        ) from None


def _load(disk: Disk, checkpoint: Path, shard: str, empty: Empty = in_memory) -> list[NDArray[np.float32]]:
    tensors, _ = tensor_file.read(disk, checkpoint / f"{shard}.safetensors", empty)
    return list(tensors.values())


def _flatten(shards: Mapping[str, list[NDArray[np.float32]]]) -> dict[str, NDArray[np.float32]]:
    return {f"{shard}/{i}": array for shard, arrays in shards.items() for i, array in enumerate(arrays)}


def _unflatten(tensors: Mapping[str, NDArray[np.float32]]) -> Shards:
    shards: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, array in tensors.items():
        shard, _, position = name.rpartition("/")
        shards.setdefault(shard, {})[int(position)] = array
    return {shard: [arrays[i] for i in range(len(arrays))] for shard, arrays in shards.items()}


@dataclass(frozen=True, slots=True)
class _Change:
    """The feedback became that of `round` at `since` (steady time); `given_back`: the newest round whose offer went
    back into it."""

    round: int
    given_back: int
    since: float


class FeedbackWriter:
    """Saves the arrays of `feedback`, which are of `round` and `given_back` now, in the background.

    A caller that changes the feedback waits for `written` before, and calls `changed` after. So a copy is at most one
    change behind, and an offer is on disk before its feedback (docs/adr/0007-offer-before-feedback.md).

    on_disk: the round of the feedback on disk; 0: there is none.
    """

    def __init__(
        self, storage: Storage, feedback: Shards, clock: Clock, round: int, *, given_back: int = 0, on_disk: int = 0
    ) -> None:
        self._storage = storage
        self._feedback = feedback
        self._clock = clock
        self._newest = _Change(round, given_back, clock.steady())
        self._unsaved: _Change | None = None
        self._on_disk: int | None = on_disk or None
        self._is_behind = round > on_disk
        self._saving: asyncio.Task[None] | None = None

    @property
    def given_back(self) -> int:
        """The newest round whose offer went back into the feedback."""
        return self._newest.given_back

    def changed(self, round: int, *, restored: bool = False) -> None:
        """The feedback is that of `round` now; `restored`: the round's offer went back into it."""
        given_back = round if restored else self._newest.given_back
        self._newest = self._unsaved = _Change(round, given_back, self._clock.steady())
        self._is_behind = True

    async def changed_between(self) -> None:
        """The feedback or its notes changed between rounds: waits until that is on disk. Raises UsageError."""
        self._is_behind = True
        await self.on_disk()

    def look(self) -> None:
        """Begins to save when it is due; call it periodically. Raises what an earlier saving raised (UsageError)."""
        if self._saving is not None and self._saving.done():
            self._saving.result()
        if retention.feedback_is_due(self._unsaved.since if self._unsaved else None, self._clock.steady()):
            self._begin()

    async def written(self) -> None:
        """Waits until the feedback is saved, in memory or on disk. Raises UsageError."""
        self._begin()
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def on_disk(self) -> None:
        """Waits until the feedback is on disk. Raises UsageError."""
        if self._is_behind:
            self._on_disk, self._unsaved = None, self._newest
        await self.written()

    def _begin(self) -> None:
        if self._unsaved is not None:
            change, self._unsaved = self._unsaved, None
            self._saving = asyncio.create_task(self._save(change))

    async def _save(self, change: _Change) -> None:
        whole = retention.feedback_goes_to_disk(self._on_disk, change.round)
        save = self._storage.save_feedback if whole else self._storage.copy_feedback
        await asyncio.to_thread(save, change.round, self._feedback, change.given_back)
        if whole:
            self._on_disk, self._is_behind = change.round, self._newest is not change
