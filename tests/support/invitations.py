"""Parts that unit tests of invitations share with others."""

from __future__ import annotations

from protocol.identity import Identity
from protocol.ledger import access
from protocol.ledger.access import Ticket
from protocol.run.manifest import AdmissionSpec
from tests.support import tiny

OPERATOR, ANOTHER, OUTSIDER = tiny.OPERATORS[:3]
CLOSED = tiny.manifest(rounds=5, operators=(OPERATOR.peer_id, ANOTHER.peer_id), admission=AdmissionSpec(mode="listed"))
EXPIRES = 1_000_000
FRIENDS = [Identity(bytes([100 + i]) * 32).peer_id for i in range(8)]


def ticket(
    *, count: int = 2, seed: int = 50, operator: Identity = OPERATOR, run: str = CLOSED.run_id, reason: str = ""
) -> Ticket:
    return access.issue(operator, bytes([seed]) * 32, run, expires=EXPIRES, count=count, reason=reason)
