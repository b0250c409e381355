"""Parts that hostile tests of made up share with others."""

from __future__ import annotations

from peer import events
from tests.hostile.ground import Ground
from tests.support.false_states import believes_the_log, digests_of


def said(ground: Ground) -> list[events.Attest]:
    """What everybody says of states, as the node tells it."""
    return [e.body for e in ground.events if isinstance(e.body, events.Attest)]


def is_right(ground: Ground) -> None:
    """Every digest that an honest peer ever signed is the one that the log gives, and so is what commits say."""
    right, honest = digests_of(ground), {peer.id for peer in ground.peers.values()}
    believes_the_log(ground.archive.commits, right)
    theirs = [attest for attest in said(ground) if attest.peer in honest]
    assert {attest.peer for attest in theirs} == honest
    for attest in theirs:
        assert attest.digests.items() <= right[attest.round].items()
