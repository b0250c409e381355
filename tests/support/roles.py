"""Parts that fault tests of roles share with others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from protocol.run.manifest import Manifest, TimingSpec
from tests.e2e import swarms
from tests.support import tiny

SECONDS = 3.0
"""Of a round."""


def make_manifest(start_peers: int) -> Manifest:
    made = swarms.manifest(swarms.options(Path("unused"), full=1, rounds=10**6, inner_steps=1000))
    return dataclasses.replace(
        made,
        operators=(tiny.OPERATOR.peer_id,),
        start_peers=start_peers,
        train=dataclasses.replace(made.train, micro_batches=8, rows=1, sequence=16),
        data=swarms.text(16),
        timing=TimingSpec(round_deadline=120.0, round_seconds=SECONDS, heartbeat=0.5, gone_after=10.0),
    )
