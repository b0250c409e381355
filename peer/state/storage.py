"""A peer's durable state: its identity's folder, checkpoints of shards, and the newest offer with its error feedback.

    DIR/lock                          held while a daemon runs
    DIR/identity.key                  Ed25519, in libp2p's format
    DIR/blobs/                        payloads, our own and others' (peer/net/blobs/store.py)
    DIR/offer-<round>.json            what was offered in the round, and whether the offer before was given back
    DIR/feedback-<round>.safetensors  error feedback after the round was packed; metadata `given_back`: the newest round whose offer
                                      went back into it; `copy`: the name of its copies in memory, `number`: of this file, for which
                                      they count; and what is noted of hand-overs (peer/state/giving.py, taking.py)
    MEMORY/<copy>.safetensors         the same after a later `round`, in memory (peer/net/disk.py): a killed process leaves it
    DIR/handover-<serial>.json        a part of the feedback that goes to another peer, and its .payload, which is served as a blob
    DIR/checkpoint-<round>/           <shard>.safetensors, optimizer.safetensors, meta.json with the digest of each shard

Everything appears by rename after fsync, so that a crash leaves the old or the new, and what a kill leaves half-written is
removed at the next start. Tensors are named by position (a shard's parameters), `shard/position` (feedback) or as the trainer
names them. A checkpoint's shards are served as blobs: their digests are those that the log carries.
"""

from __future__ import annotations

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

from peer.net.blobs import Blob, BlobStore
from peer.net.disk import Disk, LocalDisk, disk_error
from peer.state import tensor_file
from protocol.codec import blob_hash
from protocol.codec.topk import Empty, in_memory
from protocol.errors import LocalError, UsageError
from protocol.ledger import part_lists
from protocol.run import layout
from protocol.wire.calls import Handover
from protocol.wire.commit import Part
from protocol.wire.schema import SchemaError, build, plain
from protocol.wire.session import Offer

Shards = dict[str, list[NDArray[np.float32]]]
KEPT = 2
"""Checkpoints and feedback files that are kept."""
COPIES = 2
"""Of the feedback that are in memory while the newer one is written."""
GIVEN_BACK, COPY, NUMBER, ROUND = "given_back", "copy", "number", "round"
"""What is noted beside a feedback, or an offer; see above."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """θ(round) of the shards that were held, and the inner optimizer's state."""

    round: int
    theta: Shards
    optimizer: Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Feedback:
    """Error feedback after `round` (0: none), and the newest offer, if it may still have to be given back. `since`: the offers that
    this feedback does not know of, oldest first; `given_back`: those that are to go back into it, by round."""

    round: int
    feedback: Shards
    offer: Offer | None
    since: tuple[Offer, ...] = ()
    given_back: frozenset[int] = frozenset()
    newest_back: int = 0
    """The newest round whose offer went back, whether this feedback knows of it or not."""


class Storage:
    """A peer's folder. One process at a time. `limit`: bytes for payloads. Raises UsageError where the disk refuses."""

    def __init__(self, folder: Path, limit: int | None = None, disk: Disk | None = None) -> None:
        self.folder = folder
        self.disk: Disk = disk or LocalDisk()
        self._lock = self.disk.lock(folder, "potluck process")
        for name in self.disk.names(folder):
            if name.startswith((".checkpoint-", ".feedback-", ".offer-", ".handover-")):
                self.disk.remove(folder / name)
        self.blobs = BlobStore(folder / "blobs", limit, self.disk)
        self.empty: Empty = in_memory
        """Makes the arrays that are read from here, and others of θ and the feedback."""
        self.in_files = False
        """Whether it makes them in files."""
        self.notes: dict[str, str] = {}
        """What the next `save_feedback` writes beside the feedback, and the last one has written: one change with it."""
        self.offers: list[Offer] = []
        """Those on disk, oldest first. Their payloads are needed: what they sent is to be taken from an older feedback."""
        self.free_memory: Callable[[], int] = lambda: sys.maxsize
        """Bytes that a copy of the feedback may take now."""
        self.saved_round = 0
        """Of the feedback on disk; 0: there is none."""
        self._returned: set[int] = set()  # rounds whose offers went back into the feedback
        self._copy, self._number = "", 0
        self._handovers: dict[str, Blob] = {}
        self._kept = self._read_index()

    def close(self) -> None:
        """Lets another process use the folder."""
        self._lock.close()

    def use_files(self) -> None:
        """From now on `empty` makes arrays in files of the folder (peer/net/disk.py), and raises UsageError where it is full."""
        self.empty, self.in_files = functools.partial(self.disk.arrays, self.folder), True

    # --- error feedback and offers

    def save_offer(self, offer: Offer, given_back: int = 0) -> None:
        """Makes an offer durable; its payloads are. `given_back`: the newest round whose offer went back into the feedback. The offers since
        the oldest feedback on disk are kept."""
        self.offers.append(offer)
        self._returned.add(given_back)
        said = {**plain(offer), GIVEN_BACK: given_back}
        self.disk.write(self.folder / f"offer-{offer.round:08d}.json", json.dumps(said).encode())

    def own_payload(self, offer: Offer, part: Part) -> bytes:
        """One of the payloads that were offered. Raises LocalError."""
        payload = self.blobs.get(part.digest)
        if payload is None:
            raise LocalError(
                f"payload {part.digest[:12]} of round {offer.round}: its file in {self.blobs.folder} is gone or"
                f" damaged; that much of this machine's work is lost, remove {self.folder}/offer-* and start again"
            )
        return payload

    def save_feedback(self, round: int, feedback: Shards, given_back: int = 0) -> None:
        """Makes the feedback after packing `round` durable; `given_back` as for `save_offer`."""
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
        """Those of earlier rounds; a payload that went back into the feedback is not needed any more then."""
        for offer in [o for o in self.offers[:-1] if o.round < before]:
            self.offers.remove(offer)
            self.disk.remove(self.folder / f"offer-{offer.round:08d}.json")
            if offer.round in self._returned:
                for name in {part_lists.root_of(offer.parts), *(part.digest for part in offer.parts)}:
                    self.blobs.protected.discard(name)
                    self.blobs.remove(name)

    def copy_feedback(self, round: int, feedback: Shards, given_back: int = 0) -> bool:
        """Keeps the feedback in memory for the next process, where that has room. Whether it does."""
        size = COPIES * sum(array.nbytes for arrays in feedback.values() for array in arrays)
        folder = self.disk.memory(size) if self._copy and self.free_memory() >= size else None
        if folder is None:
            return False
        pieces = tensor_file.pieces(_flatten(feedback), {**self._metadata(given_back), ROUND: str(round)})
        with contextlib.suppress(UsageError):  # others may have taken the room
            self.disk.write(folder / f"{self._copy}.safetensors", *pieces, sync=False)
            return True
        return False

    def _metadata(self, given_back: int) -> dict[str, str]:
        return {**self.notes, GIVEN_BACK: str(given_back), COPY: self._copy, NUMBER: str(self._number)}

    def load_feedback(self) -> Feedback:
        """The newest feedback that can be read, and what was offered since."""
        round, feedback, notes = 0, Shards(), dict[str, str]()
        for saved, path in reversed(self._numbered("feedback-*.safetensors")):
            with contextlib.suppress(OSError, tensor_file.Damaged):
                tensors, notes = tensor_file.read(self.disk, path, self.empty)
                round = self.saved_round = saved
                feedback = _unflatten(tensors)
                break
        round, feedback, notes = self._load_copy(notes) or (round, feedback, notes)
        if notes.pop("restored_offer", "") == "True":  # as earlier versions said it
            notes[GIVEN_BACK] = str(round)
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
        """The copy in memory of the feedback on disk that has these notes, if it is of a later round."""
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
        """The offers that can be read, oldest first, and the rounds of those that went back into the feedback before a later one."""
        offers, backs = list[Offer](), set[int]()
        for _, path in self._numbered("offer-*.json"):
            with contextlib.suppress(OSError, ValueError, SchemaError):
                said = json.loads(self.disk.read(path))
                backs.add(int(said.pop(GIVEN_BACK, 0)))
                offers.append(build(Offer, said))
        return offers, backs

    def forget_older_feedback(self) -> None:
        """Only the newest feedback is right from now on: a part of it goes elsewhere."""
        *older, newest = self._numbered("feedback-*.safetensors")
        for _, path in older:
            self.disk.remove(path)
        self._forget_offers(newest[0])

    def save_handover(self, handover: Handover, payload: bytes | None = None) -> None:
        """Makes a hand-over durable, or how far it is. Its payload is served as a blob."""
        record, data = self._handover(handover.serial)
        if payload is not None:
            self.disk.write(data, payload)
        self.disk.write(record, json.dumps(plain(handover)).encode())
        self._handovers[handover.blob] = Blob(self.disk, data, 0, handover.size)

    def load_handovers(self) -> list[Handover]:
        """Those that can be read, oldest first."""
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
        """The files of its record and its payload."""
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
        """The newest checkpoint of which anything can be read. Shards whose bytes are not those that were written are left
        out and told: whoever wants them gets them as any shard that is not held."""
        for round, path in reversed(self._numbered("checkpoint-*")):
            kept = self._kept.get(round, {})
            theta = {}
            for shard in list(kept):
                arrays = self.load_shard(round, shard, kept[shard][0])
                if arrays is None:
                    del kept[shard]
                    warn(
                        f"file {path / shard}.safetensors: damaged; this shard is built again from the others and the log"
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
        """A shard of a checkpoint, or None where it is not there with this digest."""
        try:
            arrays = _load(self.disk, self.folder / f"checkpoint-{round:08d}", shard, self.empty)
        except (OSError, tensor_file.Damaged):
            return None
        return arrays if layout.shard_digest(arrays) == digest else None

    def states(self) -> dict[int, dict[str, str]]:
        """Round -> shard -> digest of all that the checkpoints have."""
        return {round: {shard: name for shard, (name, _) in kept.items()} for round, kept in self._kept.items()}

    def find(self, name: str) -> Blob | None:
        """Where the bytes of a checkpoint's shard with this digest lie, or those of a hand-over's payload."""
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
    """Round and θ of a peer's checkpoint, which is only read. Raises UsageError."""
    try:
        meta = json.loads((checkpoint / "meta.json").read_text())
        return int(meta["round"]), {shard: _load(LocalDisk(), checkpoint, shard, empty) for shard in meta["digests"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"checkpoint {checkpoint}: cannot be read ({type(error).__name__}); give a folder checkpoint-… of a peer"
        ) from None


def _load(disk: Disk, checkpoint: Path, shard: str, empty: Empty = in_memory) -> list[NDArray[np.float32]]:
    """A shard's tensors. Raises OSError, tensor_file.Damaged."""
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
