"""What a build says of its files: before it, what is read as what and what is left out; behind it, counts of each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from peer.corpus.documents import Reading
from peer.corpus.records import FileCounts
from peer.corpus.sources import Source

REPORT = "report.json"
"""In a corpus's folder: the whole of it. Its digest does not follow from this."""
SHOWN = 20
"""So many files are named on the screen."""
_KINDS = {
    "text": "text, one document",
    "jsonl": "JSON lines",
    "json": "JSON",
    "csv": "CSV",
    "tsv": "TSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
}


def planned(sources: Sequence[Source], reading: Reading) -> Iterator[str]:
    """What will be read, and what is left out."""
    files = [file for source in sources for file in source.files]
    for file in files[:SHOWN]:
        packed = f" in {file.compression}" if file.compression else ""
        rows = "" if file.format == "text" else f", a document a row, column {reading.column} (string)"
        yield f"reads {file}: {_KINDS[file.format]}{packed}{rows}; {file.size_bytes:,} bytes"
    if len(files) > SHOWN:
        yield f"reads {len(files) - SHOWN:,} more files: all are in {REPORT}"
    out = [left for source in sources for left in source.left_out]
    yield from (f"leaves out {left}" for left in out[:SHOWN])
    if len(out) > SHOWN:
        yield f"leaves out {len(out) - SHOWN:,} more: all are in {REPORT}"


def counted(counts: dict[str, FileCounts]) -> Iterator[str]:
    """What was read of each file; those of which rows were left out come first."""
    order = sorted(counts.items(), key=lambda item: item[1].left_out == 0)
    for name, found in order[:SHOWN]:
        empty = f", {found.without_text:,} without text" if found.without_text else ""
        yield f"{name}: {found.documents:,} documents{empty}, {found.text_bytes:,} bytes, {found.tokens:,} tokens"
        if found.left_out:
            yield f"{name}: {found.left_out:,} bad rows are left out, such as {found.first_left_out}"
    if len(order) > SHOWN:
        yield f"{len(order) - SHOWN:,} more files: all are in {REPORT}"


def written(sources: Sequence[Source], counts: dict[str, FileCounts]) -> bytes:
    """The file REPORT."""
    formats = {str(file): file.format for source in sources for file in source.files}
    found = {
        "files": [
            {"file": name, "format": formats.get(name, ""), **dataclasses.asdict(counts.get(name, FileCounts()))}
            for name in {**formats, **counts}
        ],
        "left_out": [
            {"file": str(left).rsplit(": ", 1)[0], "reason": left.reason} for s in sources for left in s.left_out
        ],
    }
    return json.dumps(found, indent=1, ensure_ascii=False).encode() + b"\n"
