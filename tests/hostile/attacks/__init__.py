"""Everything that an enemy was let do to a node and a peer, in one list for the suite and the benchmark."""

from __future__ import annotations

from tests.hostile.attacks import asking, opening, saying
from tests.hostile.attacks.attacker import Attack

ATTACKS: dict[str, Attack] = {a.name: a for a in (*saying.ATTACKS, *opening.ATTACKS, *asking.ATTACKS)}
