"""The log on disk: decided commits are read again, torn ones are not, and damage is no crash."""

from __future__ import annotations

import dataclasses
import io
import shutil
import struct
import zlib
from pathlib import Path

import pytest

from bootstrap.archive import Archive
from protocol.errors import LocalError, UsageError
from protocol.wire import encoding, framing, logfile
from protocol.wire.commit import Commit
from protocol.wire.logfile import Damaged
from tests.support import tiny

MANIFEST = tiny.manifest()


def commits(count: int) -> list[Commit]:
    out: list[Commit] = []
    for round in range(count):
        before = out[-1] if out else None
        out.append(tiny.commit(MANIFEST, before, time=float(round), digests={"embed": "0" * 64}))
    return out


def raws(count: int) -> list[bytes]:
    return [encoding.encode_record(tiny.record(commit)) for commit in commits(count)]


def written(found: list[bytes]) -> bytes:
    return b"".join(struct.pack(">II", len(raw), zlib.crc32(raw)) + raw for raw in found)


def read(raw: bytes) -> list[bytes]:
    return [found for _, found in logfile.records(io.BytesIO(raw), Path("DIR/log"))]


def open_archive(folder: Path) -> Archive:
    return Archive(folder, MANIFEST)


def test_a_log_of_another_version_is_said_to_be_one(tmp_path: Path) -> None:
    """Unknown fields of another version's commits make the signatures those of other bytes; nothing is damaged."""
    open_archive(tmp_path).close()
    record = framing.unpack_message(raws(1)[0])
    newer = {**record, "v": dict.fromkeys(record["v"], bytes(64))}
    for raw in (framing.pack_message(newer), framing.pack_message({**record, "c": {"later": 1}})):
        (tmp_path / "log").write_bytes(written([raw]))
        with pytest.raises(
            UsageError, match="byte 0 is not as this version of Potluck writes it; start the version that"
        ):
            open_archive(tmp_path)
        assert (tmp_path / "log").read_bytes() == written([raw]), "it is as it was"


def test_what_was_appended_is_read_again_in_pages(tmp_path: Path) -> None:
    node = open_archive(tmp_path)
    for commit in commits(3):
        node.append(tiny.record(commit))
    node.close()
    again = open_archive(tmp_path)
    assert list(again.commits) == commits(3)
    assert framing.unpack_message(again.after(-1)) == raws(3)
    assert framing.unpack_message(again.after(1)) == raws(3)[2:]
    assert framing.unpack_message(again.after(2)) == []
    with pytest.raises(UsageError, match="another bootstrap node uses it"):
        open_archive(tmp_path)
    again.close()


def test_a_commit_that_could_not_be_read_again_is_not_appended(tmp_path: Path) -> None:
    node = open_archive(tmp_path)
    first, second, _ = commits(3)
    node.append(tiny.record(first))
    with pytest.raises(LocalError, match="commit of round 1: nobody could read its record"):
        node.append(tiny.record(dataclasses.replace(second, members=("m",) * 70_000)))
    node.close()
    assert (tmp_path / "log").read_bytes() == written(raws(1))
    again = open_archive(tmp_path)
    assert list(again.commits) == [first]
    again.close()


def test_every_torn_tail_ends_the_log_before_it(tmp_path: Path) -> None:
    records = raws(3)
    whole, last = written(records), written(records[2:])
    for cut in range(1, len(last)):
        assert read(whole[:-cut]) == records[:2]
    (tmp_path / "log").write_bytes(whole[:-5])
    node = open_archive(tmp_path)
    node.append(tiny.record(commits(3)[2]))
    node.close()
    assert (tmp_path / "log").read_bytes() == whole


def test_a_flipped_bit_anywhere_before_the_last_record_is_damage(tmp_path: Path) -> None:
    """Also in a length that reaches beyond the file: cut off there, decided commits would be lost."""
    records = raws(3)
    whole = written(records)
    inside = len(written(records[:1]))
    for position in range(inside, len(written(records[:2]))):
        for bit in (1, 128):
            raw = bytearray(whole)
            raw[position] ^= bit
            with pytest.raises(Damaged, match=rf"^log DIR/log: the record at byte {inside} is damaged; "):
                read(bytes(raw))
    raw = bytearray(whole)
    raw[inside] ^= 128
    (tmp_path / "log").write_bytes(raw)
    with pytest.raises(UsageError, match="damaged") as refused:
        open_archive(tmp_path)
    assert refused.value.exit_code == 2
    assert (tmp_path / "log").read_bytes() == raw, "nothing is cut off"


def test_a_reader_sees_what_was_there_when_it_began(tmp_path: Path) -> None:
    path, records = tmp_path / "log", raws(3)
    path.write_bytes(written(records[:2])[:-5])
    with open(path, "rb") as file, open(path, "ab") as writer:
        reading = logfile.records(file, path)
        assert next(reading)[1] == records[0]
        writer.write(written(records[:2])[-5:] + written(records[2:]))
        writer.flush()
        assert list(reading) == []
    assert read(path.read_bytes()) == records


def test_a_log_whose_folder_is_gone_is_told_in_one_line(tmp_path: Path) -> None:
    archive = open_archive(tmp_path / "node")
    (first,) = commits(1)
    shutil.rmtree(tmp_path / "node")
    with pytest.raises(UsageError, match=r"^directory .*node: No such file or directory; free space or choose another"):
        archive.append(tiny.record(first))
    assert list(archive.records) == [], "what is not on disk is not known"
    archive.close()
