"""Corpora: their contents, one digest however they are built, kills, full disks, damage."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from peer.cli.data import tokenizer_file
from peer.corpus import build, sources
from peer.corpus.build import Request
from peer.corpus.records import HELD_OUT, HELD_OUT_TOKENS, RANKS, Counts, held_out_rank
from peer.corpus.sources import Unit
from peer.corpus.text import CHUNKS, INDEX, CorpusReader
from peer.corpus.tokenizing import Pool
from peer.net.blobs import BlobStore
from peer.net.disk import Disk
from protocol.errors import LocalError, UsageError
from protocol.run.corpus import TOKENIZER as TOKENIZER_FILE
from protocol.run.corpus import CorpusIndex

L = 16
TOKENIZER = tokenizer_file("sotu-4k.json")
DEADLINE = 120.0


def texts(count: int = 400) -> list[str]:
    """Documents of one word to some hundreds, and some without any text."""
    draw = random.Random(1)
    words = [
        "we",
        "the",
        "people",
        "of",
        "this",
        "little",
        "town",
        "bring",
        "what",
        "we",
        "have",
        "and",
        "cook",
        "a",
        "better",
        "soup",
    ]
    return [
        "" if i % 50 == 7 else f"{i} " + " ".join(draw.choices(words, k=draw.choice((1, 9, 30, 200))))
        for i in range(count)
    ]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return path


def request(out: Path, *names: Path | str, **options: Any) -> Request:
    found = tuple(sources.parse(str(name)) for name in names)
    return Request(**{"sources": found, "tokenizer": TOKENIZER, "sequence": L, "out": out, **options})


def made(asked: Request, disk: Disk | None = None, say: Callable[[str], None] = lambda line: None) -> CorpusIndex:
    return build.build(asked, disk or Disk(), say, threading.Event())


# --- what a corpus holds, computed from the words of docs/adr/0021


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def expected(documents: list[str], seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """(training sequences, held-out sequences) of a small corpus."""
    tokenizer = Tokenizer.from_str(TOKENIZER.decode())
    digest = hashlib.sha512(b"potluck/corpus/" + str(seed).encode()).digest()
    a, b, c, d = (int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(4))
    records = []
    for number, text in enumerate(documents):
        ids = (
            [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id("<|endoftext|>")]
            if text
            else []
        )
        held_out = mix(mix(number ^ c) ^ d) < 2**64 // (HELD_OUT * RANKS) * RANKS
        part = 0
        while len(ids) > (part > 0):
            records.append((mix(mix(((number << 24) | part) ^ a) ^ b), held_out, ids[: L + 1]))
            ids, part = ids[L:], part + 1
    sides: list[list[list[int]]] = []
    for side in (False, True):
        found, short = [], []
        for _, held_out, ids in sorted(records):
            if held_out != side:
                continue
            if len(ids) == L + 1:
                found.append(ids)
                continue
            short += ids
            if len(short) > L:
                found.append(short[: L + 1])
                short = short[L:]
        sides.append(found)
    return sides[0], sides[1]


@pytest.mark.parametrize("seed", [0, 7])
def test_documents_are_cut_shuffled_and_packed_as_the_record_of_the_decision_says(
    seed: int, source: Path, tmp_path: Path
) -> None:
    index = made(request(tmp_path / "out", source, seed=seed))
    reader = CorpusReader(tmp_path / "out", Disk(), index.digest)
    train, held_out = expected(texts(), seed)
    assert reader.sequences([range(index.sequences)]).tolist() == train
    assert reader.held_out(10**6).tolist() == held_out
    assert reader.held_out(2).tolist() == held_out[:2]
    assert reader.sequences([range(5, 7), range(3, 4)]).tolist() == [train[5], train[6], train[3]]
    assert reader.sequences([]).shape == (0, L + 1)
    assert index.documents == sum(map(bool, texts()))
    assert index.text_bytes == sum(len(text.encode()) for text in texts())
    tokenizer = Tokenizer.from_str(TOKENIZER.decode())
    assert index.tokens == sum(len(tokenizer.encode(text).ids) + 1 for text in texts() if text)


def test_the_digest_does_not_change_between_versions(source: Path, tmp_path: Path) -> None:
    assert made(request(tmp_path / "out", source)).digest == FROZEN


FROZEN = "e1ddc991d656fff329fe95ae5be324772f132195d2646ec0f86e5998612e1716"


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 3},
        {"spill_ids": 1},
        {"spill_ids": 1, "merge_ids": 100},
        {"most_ids": 1},
        {"workers": 2, "spill_ids": 3000, "merge_ids": 999},
    ],
    ids=str,
)
def test_how_it_is_built_does_not_show(options: dict[str, int], source: Path, tmp_path: Path) -> None:
    plain = made(request(tmp_path / "plain", source))
    assert made(request(tmp_path / "other", source, **options)) == plain
    names = [sorted(p.name for p in (tmp_path / out).rglob("*")) for out in ("plain", "other")]
    assert names[0] == names[1]


def test_the_form_of_the_source_does_not_show(source: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()[:150]))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()[150:]))
    halves = made(request(tmp_path / "halves", tmp_path / "b.jsonl", tmp_path / "c.jsonl"))
    assert halves == made(request(tmp_path / "whole", source))
    assert halves != made(request(tmp_path / "seed", source, seed=1))


def test_a_document_that_spans_units_is_one_document(tmp_path: Path) -> None:
    text = "".join(f"Line {i} of a long story.\n" for i in range(25_000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    index = made(request(tmp_path / "text", tmp_path / "a.txt", spill_ids=1))
    assert index == made(request(tmp_path / "row", tmp_path / "a.jsonl"))
    assert index.documents == 1
    assert index.held_out_sequences == index.tokens // (HELD_OUT * L), (
        "sequences are held out where documents cannot be"
    )
    assert index.sequences + index.held_out_sequences == (index.tokens - 1) // L


def test_few_documents_are_held_out_of_a_large_corpus() -> None:
    small = Counts(tokens=np.full(RANKS + 1, 10))
    assert held_out_rank(small) == RANKS
    large = Counts(tokens=np.full(RANKS + 1, HELD_OUT_TOKENS // 4))
    assert held_out_rank(large) == 4


def test_wide_vocabularies_have_four_bytes(source: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER.decode())
    tokenizer.add_tokens([f"<<{i}>>" for i in range(1 << 16)])
    wide = tokenizer.to_str().encode()
    index = made(request(tmp_path / "wide", source, tokenizer=wide))
    narrow = made(request(tmp_path / "narrow", source))
    assert (index.id_bytes, narrow.id_bytes) == (4, 2)
    rows = [
        CorpusReader(tmp_path / out, Disk()).sequences([range(narrow.sequences)]).tolist() for out in ("wide", "narrow")
    ]
    assert rows[0] == rows[1]


def test_chunks_are_blobs_that_a_store_serves(source: Path, tmp_path: Path) -> None:
    index = made(request(tmp_path / "out", source))
    store = BlobStore(tmp_path / "out" / CHUNKS)
    chunk = store.get(index.chunk(0).name)
    assert chunk is not None
    assert len(chunk) == index.chunk(0).size == index.sequences * index.stride
    assert set(store) == {index.chunk(0).name, index.held_out}


# --- interruptions


class Refused(UsageError):
    """What a full disk says."""


class Full(Disk):
    """A disk that refuses its n-th write."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def write(self, path: Path, *pieces: Any, **options: Any) -> None:
        self.left -= 1
        if not self.left:
            raise Refused(f"directory {path.parent}: No space left on device; free space")
        super().write(path, *pieces, **options)


def test_a_disk_that_is_full_at_any_time_is_gone_on_from(source: Path, tmp_path: Path) -> None:
    plain = made(request(tmp_path / "plain", source))
    asked = request(tmp_path / "out", source, spill_ids=1)
    refused = 0
    while not (tmp_path / "out" / INDEX).exists():
        with contextlib.suppress(Refused):
            index = made(asked, Full(5))
            break
        refused += 1
        (tmp_path / "out" / CHUNKS / f".torn.{refused}").touch()
    assert refused >= 3, "it was refused in both halves"
    assert index == plain
    assert CorpusReader(tmp_path / "out", Disk()).missing() == []
    assert len(list((tmp_path / "out" / CHUNKS).iterdir())) == 4, "two chunks, and their digests"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [CHUNKS, INDEX, "report.json", TOKENIZER_FILE]


def test_a_build_that_was_asked_to_stop_goes_on(source: Path, tmp_path: Path) -> None:
    class Stopping(Disk):
        def write(self, path: Path, *pieces: Any, **options: Any) -> None:
            super().write(path, *pieces, **options)
            if path.name.startswith("spill-"):
                stop.set()

    stop, lines = threading.Event(), list[str]()
    asked = request(tmp_path / "out", source, spill_ids=1)
    with pytest.raises(LocalError, match="start the same command again: it goes on where it was"):
        build.build(asked, Stopping(), lines.append, stop)
    assert len(list((tmp_path / "out" / build.BUILDING).glob("spill-*"))) == 1
    assert made(asked, say=lines.append) == made(request(tmp_path / "plain", source))
    assert any(line.startswith("goes on behind") for line in lines)


CHILD = """
import sys, threading
from pathlib import Path
from peer.corpus import build, sources
from peer.net.disk import Disk

class Telling(Disk):
    # says what it wrote, and waits for ever when it wrote two files whose paths contain what argv[1] says
    left = 2
    def write(self, path, *pieces, **options):
        super().write(path, *pieces, **options)
        print(path, flush=True)
        self.left -= sys.argv[1] in str(path)
        if not self.left:
            threading.Event().wait()

tokenizer, out, *names = map(Path, sys.argv[2:])
asked = build.Request(sources=tuple(sources.parse(str(name)) for name in names), tokenizer=tokenizer.read_bytes(),
                      sequence=16, out=out, workers=2, spill_ids=10_000)
build.build(asked, Telling(), lambda line: None, threading.Event())
"""


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_a_build_that_is_killed_again_and_again_gives_the_same_corpus(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(1500)))
    (tmp_path / "b.txt").write_text("\n".join(texts(400)))
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    out, names = tmp_path / "out", (path, tmp_path / "b.txt")
    for kill, where in enumerate(("spill-", "/chunks/")):
        command = [sys.executable, "-c", CHILD, where, tmp_path / "tokenizer.json", out, *names]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert any(where in line for line in process.stdout), "it has come so far"
            workers = psutil.Process(process.pid).children()
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert len(workers) == (2 if where == "spill-" else 0)
        end = time.monotonic() + DEADLINE
        while not all(map(has_ended, workers)):
            assert time.monotonic() < end, "workers end with the one that they work for"
            time.sleep(0.01)
        assert len(list((out / build.BUILDING).glob("spill-*"))) > kill
        assert not (out / INDEX).exists()
    assert made(request(out, *names)) == made(request(tmp_path / "plain", *names))


def test_a_tokenizing_process_that_dies_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    before = set(psutil.Process().children())
    with Pool(tmp_path / "tokenizer.json", 2, 1) as pool:
        (worker,) = set(psutil.Process().children()) - before
        worker.kill()
        with pytest.raises(LocalError, match=r"a process that tokenizes ended \(exit code -9\); .*start again"):
            list(pool.run([Unit([b"text"], [True])]))


# --- what is refused


def test_what_is_in_the_way_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = request(out, source, spill_ids=1)
    with pytest.raises(UsageError):
        made(asked, Full(4))
    begun = sorted(p.name for p in out.rglob("*"))
    for other in (
        dataclasses.replace(asked, seed=5),
        dataclasses.replace(asked, sequence=L + 1),
        dataclasses.replace(asked, sources=asked.sources * 2),
    ):
        with pytest.raises(UsageError, match="a build of something else was begun there"):
            made(other)
    lock = Disk().lock(out / build.BUILDING, "test")
    with pytest.raises(UsageError, match="another `potluck data build` uses it"):
        made(asked)
    lock.close()
    assert sorted(p.name for p in out.rglob("*")) == begun
    made(asked)
    with pytest.raises(UsageError, match=r"has a corpus; see it with `potluck data show`"):
        made(asked)
    with pytest.raises(UsageError, match="is not empty; choose another with --out"):
        made(request(tmp_path, source))


def test_a_source_that_changed_is_not_gone_on_with(source: Path, tmp_path: Path) -> None:
    asked = request(tmp_path / "out", source, spill_ids=1)
    with pytest.raises(UsageError):
        made(asked, Full(4))
    source.write_text(source.read_text() + "\n")
    with pytest.raises(UsageError, match="or its source has changed since"):
        made(asked)


def test_a_source_that_changes_while_it_is_read_is_refused(source: Path, tmp_path: Path) -> None:
    class Changing(Disk):
        def write(self, path: Path, *pieces: Any, **options: Any) -> None:
            super().write(path, *pieces, **options)
            if path.name.startswith("spill-"):
                source.write_text(source.read_text() + "\n")

    with pytest.raises(UsageError, match="source: changed while it was read; remove the folder"):
        made(request(tmp_path / "out", source, spill_ids=1), Changing())
    assert not (tmp_path / "out" / INDEX).exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "source: has no text; name a source that has"),
        ("short", "has only 4 tokens, two sequences of 16 are needed at least"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_source_with_too_little_text_leaves_nothing_behind(
    text: str, told: str, is_there: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(text)
    if is_there:
        (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match=told):
        made(request(tmp_path / "out", tmp_path / "a.txt"))
    assert (tmp_path / "out").exists() == is_there
    assert not is_there or list((tmp_path / "out").iterdir()) == []


def test_a_request_without_a_source_or_with_a_wrong_length_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no source"):
        request(tmp_path / "out")
    with pytest.raises(UsageError, match=r"--sequence 0: must be in"):
        request(tmp_path / "out", source, sequence=0)
