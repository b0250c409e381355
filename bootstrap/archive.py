"""A bootstrap node's disk: the log of rounds, its vote, two states and the payloads since, and the run's text.

DIR/log is the run's log (protocol/wire/logfile.py); a record that a crash left incomplete is cut off at the next start.
DIR/manifest.json is the manifest, so that the folder can be verified by itself. DIR/vote is the newest promise of the
quorum's acceptor, `crc32 | promise`. DIR/blobs keeps the payloads that were committed since the older of the states
that are kept (protocol/ledger/retention.py), and the shards of both.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from peer.net.blobs import NO_ROUND, Blob, BlobStore, Coming, Place
from peer.net.disk import Disk, disk_error, disk_errors
from peer.net.lru import LruDict
from protocol.codec import blob_hash
from protocol.errors import UsageError
from protocol.ledger import board, history
from protocol.ledger.history import NEWEST, Kept, Stretch, Tip, unpacked
from protocol.ledger.retention import StateRounds
from protocol.run import corpus
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints, framing, logfile
from protocol.wire.ballot import Promise
from protocol.wire.commit import Commit, Record
from protocol.wire.encoding import MessageError
from protocol.wire.schema import SchemaError

CACHED_CHUNKS = 1024
"""Chunks whose range digests are kept in memory, 16 KiB each."""
READ_BYTES = 256 * 1024


class ServedText:
    """The run's text, served from the folder of a corpus (docs/guides/data.md), which is only read and checked.

    index: the corpus's index, as it is sent
    warn: called once for each damaged chunk
    """

    def __init__(self, folder: Path, index: bytes, disk: Disk) -> None:
        self.index = index
        self.warn: Callable[[str], None] = lambda line: None
        self._folder = folder
        self._disk = disk
        self._damaged: set[str] = set()
        self._leaves = LruDict[str, bytes](CACHED_CHUNKS)
        self._lock = threading.Lock()

    def read(self, place: Place) -> bytes:
        """Returns a range of a chunk, or its leaves; empty if it is missing or damaged."""
        with self._lock:
            leaves = self._leaves.get(place.name, b"") or self._read_leaves(place.name, place.size)
            if len(leaves) != place.leaves.length:
                return b""
            self._leaves[place.name] = leaves
        if place.index < 0:
            return leaves
        try:
            data = Blob(self._disk, self._folder / corpus.CHUNKS / place.name, 0, place.size).read(place.index)
        except OSError:
            data = b""
        if not blob_hash.is_leaf(leaves, place.index, data):
            self._tell(place.name)
            return b""
        return data

    def coming(self, place: Place, peer: str, named_by: str) -> Coming | None:
        """Returns None: nothing is being fetched."""

    def _read_leaves(self, name: str, size: int) -> bytes:
        """Returns a chunk's leaves, from their file or computed; empty if there is no such chunk."""
        path = self._folder / corpus.CHUNKS / name
        try:
            if self._disk.stat(path)[0] != size:
                return b""
            try:
                leaves = self._disk.read(path.with_name(name + corpus.LEAVES))
            except FileNotFoundError:
                leaves = b""
            if blob_hash.root(size, leaves) != name:
                leaves = Blob(self._disk, path, 0, size).leaves()
        except OSError:
            return b""
        if blob_hash.root(size, leaves) != name:
            self._tell(name)
            return b""
        return leaves

    def _tell(self, name: str) -> None:
        if name not in self._damaged:
            self._damaged.add(name)
            self.warn(f"corpus {self._folder}: chunk {name[:12]}… is damaged; copy it again, or build the corpus again")


class Archive:
    """The folder DIR of one bootstrap node, for one process at a time. Raises UsageError."""

    def __init__(self, folder: Path, manifest: Manifest, disk: Disk | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self._disk: Disk = disk or Disk()
        self._lock = self._disk.lock(folder, "bootstrap node")
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if logfile.MANIFEST not in self._disk.names(self.folder):
            self._disk.write(self.folder / logfile.MANIFEST, self.manifest.to_bytes())
        self.blobs = BlobStore(self.folder / "blobs", disk=self._disk)
        self._ends: list[int] = []
        self._reading = threading.Lock()
        """Held while the file and `_ends` are read together, by calls on threads."""
        self.records = Kept(lambda round: self._read_raws(round, round + 1)[0])
        """Each round's record as it was sent: the newest in memory, older ones on disk."""
        self.tokenizer: bytes | None = None
        with contextlib.suppress(FileNotFoundError):
            self.tokenizer = self._disk.read(self.folder / "tokenizer.json")
        self.text: ServedText | None = None
        """The run's corpus, if this node serves it."""
        self.commits = Kept(lambda round: encoding.commit_in(self.records[round]))
        """Each round's commit."""
        self.named: set[str] = set()
        """All nodes that decrees of the log have named as operators."""
        self.states = StateRounds(self.manifest)
        self._read()
        self.vote = self._read_vote()

    def close(self) -> None:
        self._lock.close()

    def save_tokenizer(self, data: bytes) -> None:
        """Stores the run's tokenizer file, which is served by name. Raises UsageError."""
        self._disk.write(self.folder / "tokenizer.json", data)
        self.tokenizer = data

    def serve_corpus(self, folder: Path, index: bytes) -> None:
        """Serves the run's corpus in `folder`; `index`: the bytes of its index, already checked."""
        self.text = ServedText(folder, index, self._disk)

    def append(self, record: Record) -> None:
        """Makes a decided commit durable. Raises UsageError; then the file is as before."""
        raw = encoding.encode_record(record)
        self._disk.append(self.folder / logfile.LOG, logfile.pack(raw))
        self._add(raw, record.commit)

    def save_vote(self, vote: Promise) -> None:
        """Makes a vote durable. Raises UsageError."""
        raw = encoding.encode(vote)
        self._disk.write(self.folder / "vote", zlib.crc32(raw).to_bytes(4, "big") + raw)
        self.vote = vote

    def since(self, round: int) -> Iterator[bytes]:
        """Yields the records after `round`; those on disk are read READ_BYTES at a time."""
        round = max(round + 1, 0)
        while round < self.records.old:
            last = bisect.bisect_right(self._ends, self._begin(round) + READ_BYTES, round + 1)
            yield from self._read_raws(round, last)
            round = last
        yield from (self.records[each] for each in range(round, len(self.records)))

    def _begin(self, round: int) -> int:
        """Returns the position of a round's record in the file."""
        return self._ends[round - 1] if round else 0

    def _read_raws(self, first: int, last: int) -> list[bytes]:
        """Reads the records of rounds `first` to `last` - 1 from disk. Raises UsageError."""
        path = self.folder / logfile.LOG
        with self._reading:
            places = [self._begin(round) for round in range(first, min(last, len(self._ends)) + 1)]
            with disk_errors(self.folder):
                data = self._disk.read(path, places[0], places[-1] - places[0])
        begin = places[0]
        return [logfile.unpack(data[a - begin : b - begin], path, a) for a, b in itertools.pairwise(places)]

    def after(self, round: int) -> bytes:
        """Returns the reply to a LOG call: as many records after `round` as fit."""
        out: list[bytes] = []
        size = 0
        for raw in self.since(round):
            size += len(raw) + 8
            if out and size > endpoints.LOG_REPLY:
                break
            out.append(raw)
        return framing.pack_message(out)

    def _read(self) -> None:
        path, end = self.folder / logfile.LOG, 0
        try:
            with self._disk.open(path) as file:
                found = logfile.records(file, path)
                while batch := list(itertools.islice(found, NEWEST)):
                    self._take_all(batch)
                    end = logfile.end_of(*batch[-1])
            if end < self._disk.stat(path)[0]:
                self._disk.truncate(path, end)
        except FileNotFoundError:
            return
        except OSError as error:
            raise disk_error(self.folder, error) from None

    def _take_all(self, batch: list[tuple[int, bytes]]) -> None:
        """Takes the next records, (position, record), by stretches; where one is wrong, one by one, to name it."""
        head = self.commits[-1] if self.commits else None
        members = board.members_after(self.manifest, head)
        tip = Tip(len(self.commits) - 1, self.manifest.run_id if head is None else head.digest, members)
        proved = list[Stretch]()
        try:
            for stretch in history.read(self.manifest, tip, [raw for _, raw in batch], "the log"):
                before = unpacked(stretch.before[-1].body) if stretch.before else head
                if history.why_not_next(self.manifest, before, stretch.last) is not None:
                    raise MessageError("the log", "is wrong")
                proved.append(stretch)
                head = stretch.last.commit
        except (MessageError, SchemaError):
            for at, raw in batch:
                self._take(raw, at)
            return
        last = {stretch.last.commit.round: stretch.last.commit for stretch in proved}
        sizes = {packed.round: packed.payload_bytes for stretch in proved for packed in stretch.before}
        for _, raw in batch:
            round = len(self.records)
            self._add(raw, last.get(round), sizes.get(round, 0))

    def _take(self, raw: bytes, at: int) -> None:
        head, where = self.commits[-1] if self.commits else None, f"log {self.folder / 'log'}: the record at byte {at}"
        try:
            record = encoding.decode_record(raw, "the log")
            problem = history.why_not_next(self.manifest, head, record)
        except MessageError:  # its checksum is right, so the disk is not at fault
            raise UsageError(
                f"{where} is not as this version of Potluck writes it; start the version that wrote it,"
                " or choose another --dir"
            ) from None
        if problem is not None:
            raise UsageError(f"{where} {problem}; restore the file or choose another --dir")
        self._add(raw, record.commit)

    def lacks(self, round: int) -> list[str]:
        """The shards of the archived state after `round` that are not stored."""
        digests = self.states.digests[round]
        return [shard for shard, name in digests.items() if self.blobs.round_of(name) != NO_ROUND]

    def drop_damaged(self, round: int) -> None:
        """Removes the files of an archived state that do not have their digests. Raises UsageError."""
        with disk_errors(self.folder):
            for name in self.states.digests[round].values():
                blob = self.blobs.find(name)
                if blob is not None and blob_hash.root(blob.size, blob.leaves()) != name:
                    self.blobs.remove(name)

    def newest_state(self, round: int) -> int:
        """The newest round up to `round` whose state is stored or follows from the seed; 0 if there is none."""
        return next((each for each in reversed(self.states.digests) if each <= round and not self.lacks(each)), 0)

    def _add(self, raw: bytes, commit: Commit | None, size: int = 0) -> None:
        """Adds the next record.

        commit: None if it is to be decoded later; then it changes no operators
        size: bytes of its payloads, where `commit` is None
        """
        self._ends.append(logfile.end_of(self._ends[-1] if self._ends else 0, raw))
        self.records.append(raw)
        if commit is None:
            self.commits.append_older()
            self.states.follow_packed(size, lambda: self.commits[-1])
            return
        self.commits.append(commit)
        self.states.follow(commit)
        if commit.board is not None:
            self.named.update(commit.board.names)

    def _read_vote(self) -> Promise | None:
        path = self.folder / "vote"
        try:
            data = self._disk.read(path)
        except FileNotFoundError:
            return None
        try:
            vote = encoding.decode(data[4:], "vote")
        except MessageError:
            vote = None
        if not isinstance(vote, Promise) or zlib.crc32(data[4:]).to_bytes(4, "big") != data[:4]:
            raise UsageError(
                f"vote {path}: damaged; to vote again could fork the run: restore it, or remove it once the others have"
                " decided the round after the log's last"
            )
        return vote
