"""How `potluck join` starts behind routers, with real daemons and NAT: what it finds, and the ways that two such peers
find to each other.

Needs the lab's script (tests/support/lab.py), and one public node for each of six peers, of which four have to see a
home.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks import reach
from tests.support.lab import SCRIPT, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a lab")
PUNCHED_SECONDS = 20.0


@contextlib.contextmanager
def street(nodes: int, *pair: str) -> Iterator[reach.Street]:
    """Two homes with these routers, which know where the other says it is."""
    chosen = argparse.Namespace(
        netlab=Path(os.environ[SCRIPT]), nodes=nodes, link=reach.LINK, relay_link=reach.RELAY_LINK, no_limit=True
    )
    a, b = pair
    with (
        reach.town(chosen, *reach.homes_of(chosen, [(a, b)])) as town,
        town.street(chosen, reach.names_of((a, b)), limited=False) as there,
    ):
        yield there


def ways(there: reach.Street) -> tuple[str, float]:
    """The way of the first stream, and of a later one where that went through a relay; seconds until then."""
    peer = there.peers[1]["peer"]
    first = there.ask(0, do="first", peer=peer)
    assert "error" not in first, first
    if first["where"]:
        return reach.named(first["where"], there), first["seconds"]
    later = there.ask(0, do="later", peer=peer)
    assert "error" not in later, later
    return reach.named(later["where"], there), first["seconds"] + later["seconds"]


def test_two_peers_behind_routers_that_let_nobody_in_make_a_hole() -> None:
    with street(6, "cone", "cone") as there:
        assert [peer["how"] for peer in there.peers] == ["private", "private"]
        way, seconds = ways(there)
        assert way == "punched"
        assert seconds <= PUNCHED_SECONDS


def test_two_peers_behind_one_router_reach_each_other_directly() -> None:
    with street(1, "cone", reach.BESIDE) as there:
        assert [peer["how"] for peer in there.peers] == ["private", "private"]
        assert ways(there)[0] == "local"


def test_who_is_let_in_is_reached_there_and_where_no_hole_can_be_made_a_relay_is_used() -> None:
    with street(1, "sym", "full") as there:
        assert [peer["how"] for peer in there.peers] == ["private", "mapped"]
        assert ways(there)[0] == "mapped"
        a, b = (peer["peer"] for peer in there.peers)
        back = there.ask(1, do="first", peer=a)
        assert "error" not in back, (back, b)
