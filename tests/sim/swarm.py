"""One simulated run: who takes part, what connects them, when it is over, and what must hold at the end."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fractions import Fraction

from protocol.planning.partition import Candidate
from protocol.run.manifest import OuterSpec
from protocol.wire.plan import Plan
from tests import tiny
from tests.sim.bootstrap_node import BootstrapNode
from tests.sim.ledger import Ledger, Vector, Violation
from tests.sim.peer_node import SPEEDS, PeerNode
from tests.sim.world import Weather, World

PEERS = (6, 6, 6, 9, 12)
QUORUMS = ((1, 1), (3, 3), (3, 3), (3, 4), (5, 5), (5, 6))
"""Sizes of the quorum, and operators' nodes."""
CHAIN_PATIENCE = 20.0
Key = tuple[int, int, int]
"""A chain: round, replica, generation."""
LATEST = 150.0
"""By then everybody has started."""


class Swarm:
    """Everything that one seed decides; `run` raises Violation if a promise is failure."""

    def __init__(
        self,
        seed: int,
        bootstrap_class: type[BootstrapNode] = BootstrapNode,
        peer_class: type[PeerNode] = PeerNode,
        verbose: bool = False,
    ) -> None:
        rng = random.Random(seed)
        self.speeds = random.Random(f"speeds {seed}")
        rounds = rng.randint(3, 8)
        count = rng.choice(PEERS)
        size, nodes = rng.choice(QUORUMS)
        names = tuple(o.peer_id for o in tiny.OPERATORS[:nodes])
        self.manifest = tiny.manifest(
            rounds=rounds,
            start_peers=rng.randint(1, count),
            operators=names,
            quorum=size,
            outer=OuterSpec(overlap=rng.choice((0, 1))),
        )
        self.world = World(rng, Weather.draw(rng), wire=seed % 10 == 0, verbose=verbose)
        self.ledger = Ledger(
            rng.choice((Fraction(1), Fraction(1, 2), Fraction(19, 20))), Fraction(1), self.manifest.run_id
        )
        self._sessions = 0
        self._chains: dict[tuple[Key, tuple[str, ...]], set[str]] = {}
        self._torn: set[tuple[Key, tuple[str, ...]]] = set()
        self.peers: dict[str, PeerNode] = {}
        self.nodes = {name: bootstrap_class(self, name) for name in names}
        whole, third = tiny.full_memory(self.manifest), tiny.third_memory(self.manifest)
        full = rng.choice((0, 1, 2, 2, 2, 3))
        for i in range(count):
            memory = whole if i < full else self.speeds.choice((third, third, third, whole - 1))
            candidate = Candidate(
                peer=f"peer-{i}",
                memory_bytes=memory,
                up_bps=rng.choice((10**6, 10**7)),
                down_bps=self.speeds.choice((0, 10**7)),
                speed_flops=self.speeds.choice(SPEEDS),
            )
            self.peers[candidate.peer] = peer_class(self, candidate, rng.uniform(2.0, 25.0))
        for node in self.nodes.values():
            self.world.at(rng.uniform(0.0, 5.0), node.start)
        self.world.weathers([*self.nodes, *self.peers], list(names))
        for peer in self.peers.values():
            late = rng.random() < 0.15
            self.world.at(rng.uniform(30.0, LATEST) if late else rng.uniform(0.0, 10.0), peer.start)
        self.world.trace("world", f"{self.world.weather}")

    def run(self) -> None:
        """Lives through the run and checks what must hold at its end."""
        world, timing = self.world, self.manifest.timing
        world.run(max(world.weather.calm_at, LATEST), lambda: False)
        left = self.manifest.rounds - min(len(n.log) for n in self.nodes.values()) + 1
        deadlines = left + 1
        over = world.run(
            world.now + deadlines * timing.round_deadline, lambda: all(p.finished for p in self.peers.values())
        )
        if not over:
            states = {p.name: (p.member.phase, p.round) for p in self.peers.values() if p.alive}
            raise Violation(
                "P4",
                f"not over {deadlines} deadlines after the faults ended: "
                f"logs {[len(n.log) - 1 for n in self.nodes.values()]}, {states}",
            )
        for peer in self.peers.values():
            self._check_end(peer)

    def _check_end(self, peer: PeerNode) -> None:
        rounds = self.manifest.rounds
        if peer.round != rounds:
            raise Violation("P4", f"{peer.name} finished after round {peer.round} of {rounds}")
        for shard, theta in peer.theta.items():
            if shard not in peer.corrupted:
                self.ledger.check_theta(peer.name, shard, rounds, theta)
            elif theta != self.ledger.theta(shard, rounds):
                self._check_told(peer, shard)
        for (who, shard), _ in self.ledger.entries.items():
            if who == peer.name:
                self.ledger.check_feedback(who, shard, peer.feedback[shard])

    def _check_told(self, peer: PeerNode, shard: str) -> None:
        """A memory error that is left at the end is reported by every node that could tell: two others had the right bits."""
        round = self.manifest.rounds
        right = self.ledger.theta_digest(shard, round)
        for node in self.nodes.values():
            known = {who: digests.get(shard) for who, digests in node.leader.attestations.of(round).items()}
            wrong = known.get(peer.name) not in (None, right)
            told = (round, peer.name, shard) in node.reports
            if wrong and not told and list(known.values()).count(right) >= 2:
                raise Violation("P1", f"{peer.name}: the memory error in {shard} was neither reconfigured nor reported")

    def new_session(self) -> int:
        self._sessions += 1
        return self._sessions

    # --- payloads

    def holder(self, digest: str, asker: str) -> str | None:
        """Somebody who is up and has a payload."""
        nodes: list[BootstrapNode | PeerNode] = [*self.nodes.values(), *self.peers.values()]
        names = [n.name for n in nodes if n.alive and n.name != asker and digest in n.payloads]
        return self.world.rng.choice(names) if names else None

    def serve(self, digest: str, source: str | None, asker: str) -> Vector | None:
        """The payload, from `source`; None if that fails."""
        if source is None or self.world.parted(source, asker) or self.world.chance(self.world.weather.fetch_failure):
            return None
        node: BootstrapNode | PeerNode = self.nodes[source] if source in self.nodes else self.peers[source]
        if not node.alive:
            return None
        volatile = node.volatile if isinstance(node, PeerNode) else {}
        return node.payloads.get(digest, volatile.get(digest))

    # --- chains: all members train together or not at all

    def joins(self, peer: PeerNode, plan: Plan, replica: int, generation: int) -> None:
        """A peer is ready to train; once all members of its chain are, they train, and may lose one of them."""
        rng, key, members = self.world.rng, (plan.round, replica, generation), plan.replicas[replica].peers
        together = self._chains.setdefault((key, members), set())
        together.add(peer.name)
        if together == set(members) and (key, members) not in self._torn:
            after = max(self.peers[p].speed for p in members)
            if self.world.chance(0.15):
                after *= rng.random()
                rng.choice((self._fails, self._hangs, self._cut))(key, list(members), after)
                return
            steps = rng.randint(1, self.manifest.train.inner_steps)
            for name in members:
                node = self.peers[name]
                node.later(after + rng.uniform(0.0, 1.0), self._ends, node, key, steps, "")
        elif len(members) > 1:
            others = [p for p in members if p != peer.name]
            peer.later(CHAIN_PATIENCE, self._gives_up, peer, key, others)

    def _fails(self, key: Key, members: list[str], after: float) -> None:
        """A member cannot go on, and says so."""
        victim = self.world.rng.choice(members)
        node = self.peers[victim]
        node.later(after, self._ends, node, key, self.world.rng.randint(0, 2), "out of memory")
        self._loses(key, victim, members, after)

    def _hangs(self, key: Key, members: list[str], after: float) -> None:
        """A member is silent, and does not know it."""
        victim = self.world.rng.choice(members)
        self._loses(key, victim, members, after)
        node = self.peers[victim]
        node.later(CHAIN_PATIENCE, node.broke, *key, self.world.rng.choice(members))

    def _cut(self, key: Key, members: list[str], after: float) -> None:
        """Two neighbours hear each other no more, the others hear of it from either."""
        if len(members) > 1:
            place = self.world.rng.randrange(len(members) - 1)
            for i, name in enumerate(members):
                lost = members[place + 1] if i <= place else members[place]
                node = self.peers[name]
                node.later(after + self.world.rng.uniform(0.1, 3.0), node.broke, *key, lost)

    def _loses(self, key: Key, victim: str, members: Iterable[str], after: float = 0.0) -> None:
        self.world.stats["lost members"] += 1
        for other in sorted(set(members) - {victim}):
            node = self.peers[other]
            node.later(after + self.world.rng.uniform(0.1, 3.0), node.broke, *key, victim)

    def _ends(self, peer: PeerNode, key: Key, steps: int, reason: str) -> None:
        if peer.job is not None and (peer.job[0].round, *peer.job[1:]) == key:
            peer.answer(steps, reason)

    def _gives_up(self, peer: PeerNode, key: Key, others: list[str]) -> None:
        """Somebody did not come."""
        if peer.job is not None:
            members = peer.job[0].replicas[peer.job[1]].peers
            if self._chains.get((key, members)) != set(members) or (key, members) in self._torn:
                peer.broke(*key, self.world.rng.choice(others))

    def left(self, name: str) -> None:
        """A process died: whoever trains with it notices, and its chain does not come together again."""
        for (key, members), together in list(self._chains.items()):
            if name in together:
                self._torn.add((key, members))
                self._loses(key, name, together)
