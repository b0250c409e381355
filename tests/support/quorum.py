"""Parts that fault tests of quorum share with others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from protocol.run.manifest import Manifest, TimingSpec
from tests.e2e import swarms
from tests.support import tiny

KEYS = tiny.OPERATORS[:4]


def four_nodes(rounds: int, start_peers: int) -> Manifest:
    """The demo's recipe with a small model and little text, a quorum of four and a lease of five seconds. A round of
    peers at the usual pace (tests/faults/paced.py) takes two seconds: a round costs processor time, and waiting none.
    """
    chosen = swarms.options(Path("unused"), full=2, chains=1, residual_width=8, rounds=rounds, inner_steps=5)
    return dataclasses.replace(
        swarms.manifest(chosen, train={"rows": 1, "sequence": 16}),
        data=swarms.text(16),
        start_peers=start_peers,
        operators=tuple(key.peer_id for key in KEYS),
        quorum=4,
        timing=TimingSpec(round_deadline=60.0, heartbeat=0.5, gone_after=5.0),
    )
