"""A volunteer attests digests that the log does not give. Network in memory; real nodes and volunteers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from protocol.run import layout
from protocol.wire.commit import Commit
from protocol.wire.session import Attest
from tests.support.volunteers import Swarm, Volunteer, manifest

ROUNDS = 10
"""Within which a liar is named."""
Lie = Callable[[int, Mapping[str, str]], dict[str, str]]
"""(round, the digests of its state) -> what it attests."""


def every(round: int, digests: Mapping[str, str]) -> dict[str, str]:
    return dict.fromkeys(digests, f"{round:064x}")


def one_of_them(round: int, digests: Mapping[str, str]) -> dict[str, str]:
    """Another shard in each round."""
    names = sorted(digests)
    return {**digests, names[round % len(names)]: f"{round:064x}"}


def now_and_then(round: int, digests: Mapping[str, str]) -> dict[str, str]:
    return every(round, digests) if round % 3 == 0 else dict(digests)


def lies(peer: Volunteer, lie: Lie) -> None:
    """From now on it attests something else; its state stays as it is."""
    tell = peer.peer.sessions.tell

    def told(message: Any) -> None:
        if isinstance(message, Attest):
            message = dataclasses.replace(message, digests=lie(message.round, message.digests))
        tell(message)

    peer.peer.sessions.tell = told  # type: ignore[method-assign]


def let_nodes_compute(swarm: Swarm, peers: int) -> None:
    """From now on no work of a round is done before all peers have attested the state that it begins with and the node
    has computed what they dispute: rounds of real runs are far longer than that takes."""

    async def hold(peer: str, round: int) -> None:
        known = swarm.leader.attestations
        await swarm.until(lambda: len(known.of(round - 1)) == peers and not known.disputed(round - 1))

    swarm.hold = hold


def refuted(commits: list[Commit]) -> set[str]:
    return {d.peer for commit in commits for d in commit.diverged if d.refuted}


@pytest.mark.parametrize("lie", [every, one_of_them, now_and_then])
async def test_one_of_two_who_attests_false_digests_is_named_and_the_other_works_on(lie: Lie, tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest(start_peers=2, rounds=1000)) as swarm:
        honest, liar = swarm.start("honest"), swarm.start("liar")
        await swarm.until(lambda: swarm.head >= 3)
        lies(liar, lie)
        let_nodes_compute(swarm, 2)
        first = swarm.head + 3
        await swarm.until(lambda: swarm.head >= first + ROUNDS)
        commits = list(swarm.archive.commits[first : first + ROUNDS])
        counted = [commit for commit in commits if any(share.peer == honest.id for share in commit.shares)]
        assert len(counted) >= 0.8 * ROUNDS, "before there was work in no round"
        assert refuted(commits) == {liar.id}
        assert {d.peer for commit in commits for d in commit.diverged} == {liar.id}
        standing = swarm.leader.standing
        assert standing.of(honest.id).reputation == 1.0
        assert standing.of(liar.id).reputation < 1.0 or standing.of(liar.id).fell
        assert set(layout.shard_names(swarm.manifest.model)) == set(commits[-1].digests)


async def test_who_lies_with_most_of_the_weight_is_named_too(tmp_path: Path) -> None:
    async with Swarm(tmp_path, manifest(start_peers=3, rounds=1000)) as swarm:
        honest, *liars = (swarm.start(name) for name in ("honest", "liar", "other"))
        await swarm.until(lambda: swarm.head >= 3)
        for liar in liars:
            lies(liar, every)
        let_nodes_compute(swarm, 3)
        first = swarm.head + 3
        await swarm.until(lambda: swarm.head >= first + ROUNDS)
        commits = list(swarm.archive.commits[first : first + ROUNDS])
        assert refuted(commits) == {liar.id for liar in liars}
        assert sum(any(share.peer == honest.id for share in commit.shares) for commit in commits) >= 0.8 * ROUNDS
        assert swarm.leader.standing.of(honest.id).reputation == 1.0
