"""Measures what compression saves of the files of a run, and what it costs.

    python -m tests.benchmarks.compressed FOLDER...

FOLDERs: of bootstrap nodes, of peers, and corpora. Every file is packed as it would travel (peer/net/compression.py):
blobs and chunks in ranges of 32 KiB, in the form that is best for the first one, a log in pages of a MiB. Files of a
kind are added up. MB/s: of one core, of bytes before.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from peer.net import compression
from protocol.codec.blob_hash import RANGE_BYTES
from protocol.wire import endpoints, framing, logfile


def pieces(path: Path) -> tuple[str, Iterator[bytes]]:
    """The kind of a file, and its pieces."""
    if path.name == logfile.LOG:
        return "log", _pages(path)
    if path.parent.name == "chunks":
        return "text", _ranges(path)
    if path.suffix == ".safetensors" and path.parent.name.startswith("checkpoint-"):
        with path.open("rb") as file:  # a header of JSON comes before the tensors, which alone travel
            return "states", _ranges(path, 8 + int.from_bytes(file.read(8), "little"))
    return "payloads and lists" if path.parent.name == "blobs" else "", _ranges(path)


def _ranges(path: Path, begin: int = 0) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        while data := file.read(RANGE_BYTES):
            yield data


def _pages(path: Path) -> Iterator[bytes]:
    page, size = [], 0
    with path.open("rb") as file:
        for _, record in logfile.records(file, path):
            if size + len(record) > endpoints.LOG_REPLY:
                yield framing.pack_message(page)
                page, size = [], 0
            page.append(record)
            size += len(record) + 8
    yield framing.pack_message(page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for path in sorted(file for folder in parser.parse_args().folders for file in folder.rglob("*") if file.is_file()):
        kind, form = pieces(path)[0], -1
        for data in pieces(path)[1] if kind else ():
            began = time.process_time()
            form = compression.form_of(data) if form < 0 else form
            packed = compression.pack(data, form)
            middle = time.process_time()
            if compression.unpack(packed, len(data)) != data:
                raise SystemExit(f"{path}: another file comes out")
            new = (len(data), len(packed), middle - began, time.process_time() - middle)
            found[kind] = [a + b for a, b in zip(found[kind], new, strict=True)]
    print("| what | bytes | packed | of it | pack MB/s | unpack MB/s |\n|---|---|---|---|---|---|")
    for kind, (size, packed, packing, unpacking) in found.items():
        rates = " | ".join(f"{size / max(seconds, 1e-9) / 1e6:,.0f}" for seconds in (packing, unpacking))
        print(f"| {kind} | {size:,.0f} | {packed:,.0f} | {100 * packed / size:.1f} % | {rates} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
