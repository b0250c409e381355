"""Every attack of tests/hostile/attacks against a real node and two real peers: rounds go on, no process ends, no
peer's loop is held up, memory and disk stay within bounds, the operator is told who it was, and what honest peers
signed is what the log gives.

All attacks come one after the other to the same node and peers. How much of the speed is left is measured by the
campaign's tests on an idle machine, and by `python -m tests.benchmarks.attacks`.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.attacks import ATTACKS
from tests.hostile.attacks.attacker import Attack
from tests.hostile.siege import HOME, Siege, rate
from tests.support.made_up import is_right

pytestmark = pytest.mark.slow
ROUNDS, IDENTITIES = 2, 4
"""Of an attack: rounds that are decided meanwhile, at least, and identities that make it, at most. Each has a daemon,
and computes all the time; the campaign has them all."""
HOMES = (f"{HOME}/32", "127.0.0.1/32", "")
"""Where an enemy is seen: its port, the interface's first address while that is taken, or none by relay."""
REASONS = {reason for attack in ATTACKS.values() for reason in attack.told}
"""Of refusals; a peer that does one thing too often often does another one, too."""
PROCESS_MIB, DAEMON_MIB, DISK_MIB = 96.0, 96.0, 24.0
"""By how much node and peers together, one daemon, and the disk may grow in an attack, at most."""
GAP_SECONDS = 1.5
"""Of processor time, which the loop of node and peers may take at once."""
LATEST_SECONDS = 120.0
"""Far above what an attack takes here."""
BOUND = 0.8
SPELL_SECONDS, SPELLS = 5.0, 3


class Field:
    """A siege whose loop goes on from one test to the next."""

    def __init__(self, folder: Path, cores: tuple[int, int] | None = None) -> None:
        self.runner = asyncio.Runner()
        self.siege = Siege(folder, cores=cores)

    def __enter__(self) -> Field:
        self.runner.run(self.siege.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self.runner.run(self.siege.__aexit__(*error))
        self.runner.close()


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    with Field(tmp_path_factory.mktemp("field")) as made:
        yield made


async def withstands(siege: Siege, attack: Attack) -> None:
    ground, before, disk = siege.ground, siege.sizes(), siege.disk()
    siege.longest_gap = 0.0
    async with siege.attacked(attack, min(attack.identities, IDENTITIES)) as blows:
        await ground.goes_on(ROUNDS)
        if attack.told and not attack.slowly:
            await ground.until(lambda: any(refused.reason in attack.told for refused in siege.refusals(blows)))
    for refused in siege.refusals(blows):
        assert refused.reason in REASONS
        assert refused.address in HOMES
    after = siege.sizes()
    assert siege.longest_gap < GAP_SECONDS
    assert after.process - before.process < PROCESS_MIB
    for name, daemon in after.daemons.items():
        assert daemon - before.daemons[name] < DAEMON_MIB, name
    assert siege.disk() - disk < DISK_MIB


@pytest.mark.parametrize("name", ATTACKS)
def test_rounds_go_on_under_attack(name: str, field: Field) -> None:
    field.runner.run(asyncio.wait_for(withstands(field.siege, ATTACKS[name]), LATEST_SECONDS))


def test_after_all_of_them_the_bits_are_those_of_the_log(field: Field) -> None:
    """No honest peer is named as one that differs, or was refused by anybody."""
    ground = field.siege.ground
    honest = {peer.id for peer in ground.peers.values()}

    async def work() -> None:
        await ground.goes_on(2)
        is_right(ground)
        assert not {d.peer for commit in ground.archive.commits for d in commit.diverged} & honest
        logs = (ground.events, *(peer.events for peer in ground.peers.values()))
        assert not {e.fields["peer"] for log in logs for e in log if e.kind == "refused"} & honest

    field.runner.run(asyncio.wait_for(work(), LATEST_SECONDS))


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """Node, peers and their daemons have one core, the enemy another."""
    with Field(tmp_path_factory.mktemp("pinned"), cores=(0, 1)) as made:
        yield made


@pytest.mark.campaign
@pytest.mark.parametrize("name", ATTACKS)
def test_four_fifths_of_the_speed_are_left(name: str, pinned: Field) -> None:
    attack, siege = ATTACKS[name], pinned.siege
    seconds = max(SPELL_SECONDS, attack.spell)

    async def work() -> float:
        quiet, left = list[float](), list[float]()
        for _ in range(SPELLS):
            quiet.append(await rate(siege.ground, seconds))
            async with siege.attacked(attack):
                left.append(await rate(siege.ground, seconds))
        return statistics.median(left) / statistics.median(quiet)

    assert pinned.runner.run(asyncio.wait_for(work(), LATEST_SECONDS + 2 * SPELLS * seconds)) >= BOUND
