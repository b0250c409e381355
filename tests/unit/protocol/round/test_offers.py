"""What was offered to a round: complete, failed or pending, and what a commit says of it."""

from __future__ import annotations

import dataclasses

from protocol.ledger.part_lists import root_of, share_of
from protocol.round.offers import MAX_OFFERS_PER_PEER, Offers
from protocol.wire.commit import Contribution, Part
from protocol.wire.plan import ReplicaSpec, StageSpec
from protocol.wire.session import Offer
from tests.support import tiny

CHAIN = ReplicaSpec(
    number=1, stages=tuple(StageSpec(peer=p, first=i, last=i + 1) for i, p in enumerate(("a", "b", "c")))
)


def offer(peer: str, steps: int = 4, replica: int = 1, loss: float | None = None) -> Offer:
    parts = (Part(shard=f"of {peer}", digest=tiny.digest(peer), size=8, norm=1.0),)
    return Offer(round=1, replica=replica, parts=parts, tokens=steps * 16, steps=steps, loss=loss)


def names(*peers: str, **changes: int) -> set[str]:
    """What has to be held of these peers' offers: payloads and lists of parts."""
    return {name for p in peers for name in (tiny.digest(p), root_of(offer(p, **changes).parts))}


def offered(*peers: str, held: tuple[str, ...] = ("a", "b", "c"), **changes: int) -> Offers:
    offers = Offers(names(*held))
    for peer in peers:
        offers.take(peer, offer(peer, **changes))
    return offers


def test_who_changes_its_offer_again_and_again_is_not_listened_to() -> None:
    offers = Offers(())
    for steps in range(1, MAX_OFFERS_PER_PEER + 1):
        assert offers.take("a", offer("a", steps=steps)) == (True, list(offer("a").parts))
    assert offers.take("a", offer("a", steps=MAX_OFFERS_PER_PEER + 1)) == (False, [])
    assert offers.of(1, "a") == offer("a", steps=MAX_OFFERS_PER_PEER)
    assert offers.take("a", offer("a", steps=MAX_OFFERS_PER_PEER)) == (True, list(offer("a").parts)), (
        "the last one may be sent again"
    )


def test_a_replica_fails_with_its_first_member_that_failed_or_diverged() -> None:
    offers = offered("a")
    assert offers.verdict(CHAIN, ("x",), (), CHAIN.peers) is None
    assert offers.verdict(CHAIN, ("c",), (), CHAIN.peers) == "peer c: its state differs from the majority's"
    offers.fail("b", "out of memory")
    offers.fail("b", "something else")
    assert offers.verdict(CHAIN, ("c",), (), CHAIN.peers) == "peer b: out of memory"
    assert (offers.has_failed("b"), offers.has_failed("a")) == (True, False)


def test_with_the_next_round_nothing_is_offered_and_nobody_has_failed() -> None:
    offers = offered("a", "b", "c")
    offers.fail("b", "?")
    offers.begin()
    assert offers.of(1, "a") is None
    assert offers.verdict(CHAIN, (), (), CHAIN.peers) is None
    assert offers.take("c", offer("c")) == (False, []), "what is held stays held"


def test_who_is_gone_is_missed_unless_all_that_it_offered_is_here() -> None:
    offers = offered("a", "b", held=("a",))
    assert offers.verdict(CHAIN, (), (), ("b", "c")) is None
    assert offers.verdict(CHAIN, (), (), ("a", "c")) == "peer b: gone", "its payload never came"
    assert offers.verdict(CHAIN, (), (), ("a", "b")) == "peer c: gone"


def test_a_share_is_whole_once_its_list_and_its_parts_are_held() -> None:
    offers, (payload, root) = offered("b", held=()), (tiny.digest("b"), root_of(offer("b").parts))
    assert offers.hold(payload) == ({"b"}, [])
    assert offers.hold(tiny.digest("something else")) == (set(), [])
    assert offers.hold(root) == ({"b"}, [share_of("b", offer("b").parts)])
    assert offers.hold(root) == (set(), []), "it is told once"


def test_a_contribution_counts_the_steps_of_the_slowest_and_the_loss_of_the_last() -> None:
    offers = offered("a", "b")
    offers.take("b", offer("b", steps=2))
    offers.take("c", offer("c", loss=1.5))
    made = offers.verdict(CHAIN, (), CHAIN.peers, CHAIN.peers)
    assert isinstance(made, Contribution)
    assert (made.replica, made.steps, made.tokens, made.loss) == (1, 2, 32, 1.5)
    assert made.shares == tuple(share_of(p, offer(p).parts) for p in "abc")
    assert offers.steps(CHAIN) == 4
    assert offers.steps(dataclasses.replace(CHAIN, number=0)) == Offers(()).steps(CHAIN) == 0
