"""The text that a peer trains on: the ids of inner steps, what is expected, and wrong or damaged corpora."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from peer import events
from peer.chain import reading
from peer.cli.data import tokenizer_file
from peer.corpus.text import CHUNKS, CorpusReader, LocalText, check, open_corpus
from peer.corpus.tokenizer import load_tokenizer
from peer.net.disk import Disk
from protocol.errors import UsageError
from protocol.run import corpus
from protocol.run import corpus as corpora
from protocol.run.manifest import DataSpec, Manifest, TokenizerSpec
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan, ReplicaSpec, StageSpec, Work
from tests.support import tiny
from tests.support.texts import NoText, write_corpus

COUNT = 50


def run_of(digest: str) -> Manifest:
    return tiny.manifest(data=DataSpec(corpus=digest))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_inner_step_reads_what_seed_slots_and_corpus_say(step: int, tmp_path: Path) -> None:
    """Also across the end of an epoch: the third step does."""
    index, ids = write_corpus(tmp_path / "corpus", COUNT, sequence=8)
    run = run_of(index.digest)
    work = Work(slot=COUNT - 7, steps=3, micro_batches=3)  # 3 micro-batches of 1 row
    text = LocalText(open_corpus(tmp_path / "corpus", Disk(), run), run.seed_bytes)
    found = asyncio.run(reading.reader(run, text, work, 11, lambda body: None)(10 + step))
    numbers: list[int] = []
    for slot in range(COUNT - 7 + 3 * (step - 1), COUNT - 7 + 3 * step):
        (one,) = corpus.sequences(run.seed_bytes, COUNT, range(slot, slot + 1))
        numbers += one
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, ids[numbers])


def test_an_id_that_the_model_has_not_is_not_trained_on() -> None:
    """A corpus may be built to have one, whatever its index says."""

    class Wild(NoText):
        async def sequences(self, slots: range) -> np.ndarray:
            return np.array([[3, 16, 0]])

    read = reading.reader(tiny.manifest(), Wild(), Work(), 1, lambda body: None)
    with pytest.raises(
        UsageError, match=r"^corpus 000000000000…: has an id outside the vocabulary of 16; the operator"
    ):
        asyncio.run(read(1))


def test_the_held_out_part_and_the_entropy_of_what_is_predicted(tmp_path: Path) -> None:
    index, ids = write_corpus(tmp_path, COUNT, sequence=8)
    text = LocalText(CorpusReader(tmp_path, Disk()), b"seed")
    assert text.index == index
    assert asyncio.run(text.held_out(3)).shape == (3, 9)
    assert asyncio.run(text.held_out(99)).shape == (4, 9)
    shares = np.bincount(ids[:, 1:].reshape(-1)) / (COUNT * 8)
    expected = -sum(p * math.log(p) for p in shares.tolist() if p)
    assert CorpusReader(tmp_path, Disk()).unigram_entropy() == pytest.approx(expected)


def test_a_chunk_that_is_missing_or_damaged_is_an_error_of_the_steps_that_read_it(tmp_path: Path) -> None:
    long = 1 << 20
    index, ids = write_corpus(tmp_path, 8, sequence=long)
    assert index.n_chunks == 2
    reader = CorpusReader(tmp_path, Disk())
    path = tmp_path / CHUNKS / index.chunk(1).name
    raw = path.read_bytes()
    path.unlink()
    np.testing.assert_array_equal(reader.sequences([range(6, 7)]), ids[6:7])
    with pytest.raises(UsageError, match=r"^corpus .*: chunk [0-9a-f]{12}… is missing; get it again, or .*$"):
        reader.sequences([range(6, 8)])
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(UsageError, match="is damaged; "):
        reader.sequences([range(7, 8)])
    path.write_bytes(raw)
    np.testing.assert_array_equal(reader.sequences([range(6, 8)]), ids[6:8])
    path.write_bytes(b"")
    np.testing.assert_array_equal(reader.sequences([range(7, 8)]), ids[7:8]), "what was read is in memory"


def test_another_corpus_than_the_runs_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", COUNT, sequence=8)
    with pytest.raises(UsageError, match=r"^corpus .*: its digest is .*, not 111111111111…; use the run's own corpus$"):
        open_corpus(tmp_path / "corpus", Disk(), run_of("1" * 64))
    with pytest.raises(UsageError, match=r"^corpus .*: No such file or directory; give the folder of a `potluck data"):
        open_corpus(tmp_path / "nothing", Disk(), run_of("1" * 64))


def test_a_corpus_that_was_not_built_for_the_run_is_refused(tmp_path: Path) -> None:
    index, _ = write_corpus(tmp_path, COUNT, sequence=8)
    run = run_of(index.digest)
    check(index, run)
    check(dataclasses.replace(index, vocab_size=9), run)
    for wrong, reason in (
        (
            dataclasses.replace(run, train=dataclasses.replace(run.train, sequence=4)),
            r"train\.sequence = 8, the manifest says 4; ",
        ),
        (
            dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=15)),
            r"model\.vocab_size = 16, the manifest says 15; ",
        ),
        (
            dataclasses.replace(run, tokenizer=TokenizerSpec(digest="2" * 64)),
            r"tokenizer\.digest = 000000000000…, the manifest says 222222222222…; ",
        ),
    ):
        with pytest.raises(UsageError, match=rf"^corpus {index.digest[:12]}…: was built for {reason}.*$") as caught:
            check(index, wrong)
        assert "\n" not in str(caught.value)
    assert corpora.from_bytes(index.to_bytes(), "x") == index


def test_the_tokenizer_is_the_manifests(tmp_path: Path) -> None:
    raw = tokenizer_file("sotu-4k.json")
    digest = hashlib.sha256(raw).hexdigest()
    path = tmp_path / "t.json"
    path.write_bytes(raw)
    assert load_tokenizer(path, digest).get_vocab_size() == load_tokenizer(raw, digest).get_vocab_size() == 4096
    with pytest.raises(UsageError, match=rf"t\.json: its digest is {digest[:12]}.*says 000000000000"):
        load_tokenizer(path, "0" * 64)
    with pytest.raises(UsageError, match="No such file"):
        load_tokenizer(tmp_path / "missing.json", digest)
    with pytest.raises(UsageError, match="not a tokenizer"):
        load_tokenizer(b"{}", hashlib.sha256(b"{}").hexdigest())


# --- what is expected


def commit(round: int, plan: Plan | None) -> Commit:
    return tiny.commit(round=round, plan=plan, leader="n", members=("n",))


def test_a_plan_says_what_will_be_read_as_soon_as_it_is_known() -> None:
    seen: list[Sequence[range]] = []
    ahead = reading.TextAhead(tiny.manifest(), "me", seen.append)
    stages = (StageSpec(peer="me", first=0, last=1), StageSpec(peer="b", first=1, last=4))
    mine = ReplicaSpec(number=3, stages=stages, work=Work(slot=10, steps=4, micro_batches=2))
    other = ReplicaSpec(number=1, stages=(StageSpec(peer="c", first=0, last=4),), work=Work(slot=99, steps=9))
    ahead.follow(None)
    ahead.follow(commit(0, Plan(round=1, replicas=(other, mine))))
    ahead.follow(commit(0, Plan(round=1, replicas=(other, mine))))
    assert seen == [[range(10, 18)]]
    overlapping = dataclasses.replace(mine, following=Work(slot=40, steps=3, micro_batches=1))
    ahead.follow(commit(1, Plan(round=2, replicas=(other, overlapping))))
    assert seen[1:] == [[range(10, 18), range(40, 43)]]
    ahead.follow(commit(2, Plan(round=3, replicas=(other,), spares=("me",))))
    ahead.expect(Plan(round=3, replicas=(other, mine)))  # a spare takes the place of a member that is lost
    ahead.follow(commit(3, None))
    assert seen[2:] == [[], [range(10, 18)], []]


def test_why_a_round_ends_early_is_told_but_not_why_one_is_sat_out() -> None:
    """That the replica's withdrawal says."""

    class Gone(NoText):
        async def sequences(self, slots: range) -> np.ndarray:
            raise UsageError("text: gone")

    told: list[events.Body] = []
    read = reading.reader(tiny.manifest(), Gone(), Work(), 5, told.append)
    for step in (5, 6):
        with pytest.raises(UsageError, match="text: gone"):
            asyncio.run(read(step))
    assert told == [events.Warning(text="text: gone; the round ends early")]
