"""A bootstrap node's disk: the log of rounds, its vote, and every payload.

DIR/log is the run's log (protocol/wire/logfile.py); what a crash left half-written at its end is cut off at the next start.
DIR/manifest.json is the run's manifest, so that the folder can be verified by itself. DIR/vote is the newest promise of the
quorum's acceptor, `crc32 | promise`.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

from bootstrap.text import ServedText
from peer.net.blobs import BlobStore
from peer.net.disk import Disk, LocalDisk, disk_error
from protocol.errors import UsageError
from protocol.ledger import board, history
from protocol.ledger.history import NEWEST, Kept, Stretch, Tip, unpacked
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints, framing, logfile
from protocol.wire.ballot import Promise
from protocol.wire.commit import Commit, Record
from protocol.wire.encoding import MessageError
from protocol.wire.schema import SchemaError

READ = 256 * 1024
"""Bytes of records that are read from disk at once."""


class Archive:
    """DIR/log, DIR/vote, DIR/tokenizer.json and DIR/blobs (which keeps all that was committed) of one bootstrap node. One process at a time. Raises
    UsageError."""

    def __init__(self, folder: Path, manifest: Manifest, disk: Disk | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self._disk: Disk = disk or LocalDisk()
        self._lock = self._disk.lock(folder, "bootstrap node")
        try:
            self._open()
        except BaseException:
            self.close()  # whoever mends it may try again in this process
            raise

    def _open(self) -> None:
        """Reads what is there."""
        if logfile.MANIFEST not in self._disk.names(self.folder):
            self._disk.write(self.folder / logfile.MANIFEST, self.manifest.to_bytes())
        self.blobs = BlobStore(self.folder / "blobs", disk=self._disk)
        self._ends: list[int] = []
        self._reading = threading.Lock()
        """Whether the file and `_ends` are of one moment: calls read it on threads of their own."""
        self.records = Kept(lambda round: self._read_raws(round, round + 1)[0])
        """Of each round, as it was sent: the newest are in memory, older ones on disk."""
        self.tokenizer = self._read_tokenizer()
        self.text: ServedText | None = None
        """The run's corpus, if this node serves it."""
        self.commits = Kept(lambda round: encoding.commit_in(self.records[round]))
        """What the records decide."""
        self.named: set[str] = set()
        """Everybody whom a decree of the log has named as an operator."""
        self._read()
        self.vote = self._read_vote()

    def close(self) -> None:
        """Lets another process use the folder."""
        self._lock.close()

    def save_tokenizer(self, data: bytes) -> None:
        """Keeps the file of the run's tokenizer, to serve it by name. Raises UsageError."""
        self._disk.write(self.folder / "tokenizer.json", data)
        self.tokenizer = data

    def _read_tokenizer(self) -> bytes | None:
        try:
            return self._disk.read(self.folder / "tokenizer.json")
        except FileNotFoundError:
            return None

    def serve_corpus(self, folder: Path, index: bytes) -> None:
        """Has the run's corpus in `folder`, which is only read, served; `index`: the bytes of its index, which were checked."""
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
        """The records after `round`; each is read when it is asked for."""
        yield from self._from(round + 1)

    def _from(self, round: int) -> Iterator[bytes]:
        """The records of this round and later ones: those that are on disk many at a time."""
        round = max(round, 0)
        while round < self.records.old:
            last = bisect.bisect_right(self._ends, self._begin(round) + READ, round + 1)
            yield from self._read_raws(round, last)
            round = last
        yield from (self.records[each] for each in range(round, len(self.records)))

    def _begin(self, round: int) -> int:
        """Where the record of a round begins in the file."""
        return self._ends[round - 1] if round else 0

    def _read_raws(self, first: int, last: int) -> list[bytes]:
        """The records of the rounds from `first` to before `last`, from disk. Raises UsageError."""
        path = self.folder / logfile.LOG
        with self._reading:
            places = [self._begin(round) for round in range(first, min(last, len(self._ends)) + 1)]
            try:
                data = self._disk.read(path, places[0], places[-1] - places[0])
            except OSError as error:
                raise disk_error(self.folder, error) from None
        begin = places[0]
        return [logfile.unpack(data[a - begin : b - begin], path, a) for a, b in itertools.pairwise(places)]

    def after(self, round: int) -> bytes:
        """The reply to a LOG call: records after `round`, as many as fit."""
        out: list[bytes] = []
        size = 0
        for raw in self._from(round + 1):
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
        """Takes these records, (position, record), which come next: as one that reads the log from others does; where something is wrong
        with them, one by one, to say with which."""
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
        for _, raw in batch:
            self._add(raw, last.get(len(self.records)))

    def _take(self, raw: bytes, at: int) -> None:
        head = self.commits[-1] if self.commits else None
        try:
            record = encoding.decode_record(raw, "the log")
            problem = history.why_not_next(self.manifest, head, record)
        except MessageError:  # its checksum is right: no disk did that
            raise UsageError(
                f"log {self.folder / 'log'}: the record at byte {at} is not as this version of Potluck writes it; start the"
                " version that wrote it, or choose another --dir"
            ) from None
        if problem is not None:
            raise UsageError(
                f"log {self.folder / 'log'}: the record at byte {at} {problem}; restore the file or choose another --dir"
            )
        self._add(raw, record.commit)

    def _add(self, raw: bytes, commit: Commit | None) -> None:
        """The next record; its commit, unless that is looked at later and says nothing of who decides."""
        self._ends.append(logfile.end_of(self._ends[-1] if self._ends else 0, raw))
        self.records.append(raw)
        if commit is None:
            self.commits.append_older()
            return
        self.commits.append(commit)
        self._note(commit)

    def _note(self, commit: Commit) -> None:
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
