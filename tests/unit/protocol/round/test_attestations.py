"""Attestations: majorities, ties, divergence, and what is forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from protocol.round.attestations import MOST_CHANGES, Attestations, Weights
from protocol.wire.commit import Diverged
from protocol.wire.session import Attest


def majority(attested: Mapping[str, Mapping[str, str]], weights: Weights) -> dict[str, str]:
    """The digest of each shard with most of the weight; none in a tie. `attested`: {peer: {shard: digest}}."""
    counts: dict[str, Counter[str]] = {}
    for peer, digests in attested.items():
        if peer in weights:
            for shard, digest in digests.items():
                counts.setdefault(shard, Counter())[digest] += weights[peer]
    found = {}
    for shard, counted in counts.items():
        ranked = counted.most_common(2)
        if len(ranked) == 1 or ranked[0][1] > ranked[1][1]:
            found[shard] = ranked[0][0]
    return found


def diverged(
    attested: Mapping[str, Mapping[str, str]], right: Mapping[str, str], ties: Weights | None = None
) -> list[Diverged]:
    """The peers of `attested`, {peer: {shard: digest}}, with other bits than the majority, which is `right`.

    With `ties`, no peer is right about a shard of which some of these say one thing and some another, and that has no
    majority.
    """
    known: dict[str, set[str]] = {}
    for peer, digests in attested.items():
        for shard, digest in digests.items():
            if ties is not None and peer in ties:
                known.setdefault(shard, set()).add(digest)
    return [
        Diverged(peer=peer, shard=shard)
        for peer, digests in sorted(attested.items())
        for shard, digest in sorted(digests.items())
        if (right[shard] != digest if shard in right else len(known.get(shard, ())) > 1)
    ]


def attested(**peers: dict[str, str]) -> Attestations:
    """What each of `peers` said of round 1."""
    known = Attestations(lambda: dict.fromkeys("abcd", 1))
    for peer, digests in peers.items():
        known.add(peer, Attest(round=1, digests=digests))
    return known


def test_the_majority_is_by_shard_and_a_tie_has_none() -> None:
    said = {
        "a": {"embed": "x", "head": "h"},
        "b": {"embed": "x", "head": "i"},
        "c": {"embed": "y"},
        "d": {"block.0": "b"},
    }
    assert majority(said, dict.fromkeys("abcd", 1)) == {"embed": "x", "block.0": "b"}
    assert majority({}, {"a": 1}) == {}


def test_who_is_no_witness_changes_nothing_but_is_told_that_it_differs() -> None:
    known = attested(a={"embed": "x"}, b={"embed": "x"})
    for number in range(10):
        fresh = known.add(f"stranger {number}", Attest(round=1, digests={"embed": "false"}))
        assert [d.peer for d in fresh] == [f"stranger {number}"]
    assert known.majority(1) == {"embed": "x"}
    assert not {"a", "b"} & {d.peer for d in known.diverged(1, ties=True)}
    alone = attested()
    alone.add("stranger", Attest(round=1, digests={"embed": "false"}))
    assert alone.majority(1) == {}, "nothing is right before a witness has said what it has"


def test_weights_that_change_count_for_rounds_of_which_nothing_was_said_yet() -> None:
    weights = {"a": 1, "b": 1}
    known = Attestations(lambda: dict(weights))
    for peer in "ab":
        known.add(peer, Attest(round=1, digests={"embed": "x"}))
    weights.clear()
    weights["c"] = 1
    known.add("c", Attest(round=1, digests={"embed": "y"}))
    known.add("c", Attest(round=2, digests={"embed": "z"}))
    known.add("a", Attest(round=2, digests={"embed": "x"}))
    assert (known.majority(1), known.majority(2)) == ({"embed": "x"}, {"embed": "z"})


def test_the_newest_round_of_a_peer_stays_when_an_older_one_arrives_late() -> None:
    known = attested(a={"embed": "x"})
    known.add("a", Attest(round=0, digests={"embed": "w"}))
    assert (known.newest("a"), known.newest("b")) == (1, -1)


def test_old_rounds_are_forgotten_with_their_majorities() -> None:
    known = attested(a={"embed": "x"})
    known.add("a", Attest(round=2, digests={"embed": "z"}))
    assert known.majority(1) == {"embed": "x"}
    known.forget(before=2)
    assert known.rounds == (2,)
    assert (known.of(1), known.majority(1)) == ({}, {})
    assert known.majority(2) == {"embed": "z"}


Said = tuple[str, dict[str, str]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.dictionaries(st.sampled_from(["embed", "block.0", "head"]), st.sampled_from("xyz"), max_size=3),
        ),
        max_size=30,
    ),
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3)),
)
def test_what_is_counted_as_it_comes_is_what_counting_all_of_it_gives(
    said: list[Said], weights: dict[str, int]
) -> None:
    known, told, newest = Attestations(lambda: weights), set[tuple[str, str]](), dict[str, dict[str, str]]()
    steady, changes = dict(weights), Counter[str]()
    for peer, digests in said:
        if changes[peer] == MOST_CHANGES and newest[peer] != digests:
            assert known.add(peer, Attest(round=1, digests=digests)) == []
            continue
        fresh = known.add(peer, Attest(round=1, digests=digests))
        if any(digests.get(shard, digest) != digest for shard, digest in newest.get(peer, {}).items()):
            steady.pop(peer, None)
            changes[peer] += 1
        newest[peer] = digests
        right = majority(newest, steady)
        assert known.majority(1) == right
        wrong = diverged(newest, right)
        assert fresh == [d for d in wrong if (d.peer, d.shard) not in told]
        told |= {(d.peer, d.shard) for d in fresh}
        assert known.of(1) == newest
        assert known.diverged(1) == wrong
        assert known.diverged(1, ties=True) == diverged(newest, right, ties=steady)
        for who in newest:
            wanted = ("embed", "head")
            agrees = {"embed", "head"} <= set(newest[who]) and not {d.shard for d in wrong if d.peer == who} & set(
                wanted
            )
            assert known.holds(who, 1, wanted) == agrees
