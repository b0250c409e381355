"""Dishonest operators: real nodes of a run, of which one lies."""

from __future__ import annotations

import itertools
import random
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from peer import events
from protocol.ledger import rules, run_state
from tests.hostile.operators import Operators
from tests.support.lying_nodes import LyingNode

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("liar", [0, 3])
async def test_one_lying_node_of_four_can_neither_fork_nor_have_an_unfair_commit_decided_nor_stop_the_run(
    liar: int, tmp_path: Path
) -> None:
    def make(*parts: Any) -> LyingNode:
        return LyingNode(*parts, rng=random.Random(liar))

    async with Operators(tmp_path, 4, liar, make) as ground:
        await ground.join("a", "b")
        await ground.goes_on(12)
        logs = [ground.archives[name].commits for name in ground.honest]
        longest = max(logs, key=len)
        for log in logs:
            assert [c.digest for c in log] == [c.digest for c in longest[: len(log)]]
        state = run_state.begin(ground.manifest)
        for commit in longest:
            assert list(rules.check(state, commit)) == []
            state = state.apply(commit)
        machine = ground.machines[ground.liar]
        assert isinstance(machine, LyingNode)
        assert machine.told.total() > 0
        accused = ground.of_kind(events.Unfair)
        assert {e.peer for e in accused} <= {ground.liar}
        for name in ground.honest:
            lease = ground.manifest.timing.gone_after
            decided = [e.time for e in ground.told[name] if isinstance(e.body, events.Commit)]
            gaps = [after - before for before, after in itertools.pairwise(decided)]
            assert max(gaps) < 2 * lease + 10 * statistics.median(gaps), "no round waits for more than two leases"
            waits = [e.body.text for e in ground.told[name] if isinstance(e.body, events.Warning)]
            skipped = Counter(re.findall(r"round \d+", text)[0] for text in waits if "does not decide" in text)
            assert all(count <= 2 for count in skipped.values()), "each costs a lease"
