"""A newcomer to a long run reads the log once, in pages, and fetches the newest state."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from peer.state.storage import Checkpoint, Storage
from protocol.run import init, layout
from protocol.run.manifest import TimingSpec
from protocol.wire import endpoints, logfile
from tests.support import long_logs, tiny
from tests.support.volunteers import Swarm, identity_of, manifest

ROUNDS = 1_200
"""More than a session's answer has, and than a page."""


@contextlib.asynccontextmanager
async def run_of_many_rounds(folder: Path, rounds: int) -> AsyncIterator[Swarm]:
    """A run that is at round `rounds`, whose state the peer "old" has."""
    timing = TimingSpec(round_deadline=600.0, heartbeat=0.2, gone_after=120.0)
    run = manifest(rounds=10**6, start_peers=1, checkpoint_rounds=100, timing=timing)
    log = long_logs.commits(run, rounds, (identity_of("old").peer_id,))
    long_logs.write(folder / "bootstrap", run, long_logs.records(log, tiny.OPERATOR))
    theta = {s: init.initial_shard(run.model, b"a state", s) for s in layout.shard_names(run.model)}
    storage = Storage(folder / "old")
    storage.save_checkpoint(Checkpoint(rounds, theta, {}), {s: layout.shard_digest(a) for s, a in theta.items()})
    storage.close()
    async with Swarm(folder, run) as swarm:
        yield swarm


def log_bytes(folder: Path) -> int:
    return (folder / "bootstrap" / logfile.LOG).stat().st_size


async def test_a_newcomer_reads_a_long_log_once_and_fetches_the_newest_state(tmp_path: Path) -> None:
    """While rounds are decided as quickly as they can be."""
    async with run_of_many_rounds(tmp_path, ROUNDS) as swarm:
        swarm.start("old")
        await swarm.until(lambda: swarm.head >= ROUNDS + 3)
        before = log_bytes(tmp_path)
        new = swarm.start("new")
        await swarm.until(lambda: any(e.kind == "recovered" for e in new.events))
        came = new.transport.traffic.received
        grown = log_bytes(tmp_path) - before
        assert before > endpoints.LOG_REPLY
        assert min(new.bases.values()) >= ROUNDS, "the newest state is taken"
        assert next(e.fields["round"] for e in new.events if e.kind == "round") > ROUNDS, "in one step"
        read = came[endpoints.LOG] + came[endpoints.SESSION]
        assert read < 1.2 * (before + grown) + 64 * 1024, "nothing of the log comes twice"
        assert new.texts() == []
        await swarm.until(lambda: any(e.kind == "offered" for e in new.events))


async def test_a_peer_that_has_the_newest_state_goes_on_with_it(tmp_path: Path) -> None:
    async with run_of_many_rounds(tmp_path, ROUNDS) as swarm:
        old = swarm.start("old")
        await swarm.until(lambda: any(e.kind == "offered" for e in old.events))
        rounds = [e.fields["round"] for e in old.events if e.kind == "offered"]
        assert rounds[0] == ROUNDS + 1, "nothing is decided without it"
        assert old.transport.traffic.received[endpoints.LOG] < 1.05 * log_bytes(tmp_path)
