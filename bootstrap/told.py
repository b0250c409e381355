"""What a bootstrap node tells, in words, and whom first."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping

from peer import events
from peer.net.directory import Directory
from protocol.identity import short_peer
from protocol.ledger.audits import Audits
from protocol.planning.partition import Candidate
from protocol.quorum.paxos_events import Refused, Skipped
from protocol.round.accusations import Accusation
from protocol.round.leader_events import Moved, Report, Resting
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.wire.commit import Commit


def finished(model: ModelSpec, round: int, final: Mapping[str, str]) -> events.RunFinished:
    """The run is over; `final`: what most have attested."""
    whole = set(layout.shard_names(model)) <= set(final)
    return events.RunFinished(round=round, state_digest=layout.state_digest(model, final) if whole else None)


def stalled(members: int, missing: tuple[str, ...], round: int) -> events.Warning:
    """Too few nodes of the quorum give signs of life; or enough do again, where none is `missing`."""
    if not missing:
        return events.Warning(text=f"quorum: enough of the {members} bootstrap nodes are back; round {round} goes on")
    names = ", ".join(short_peer(m) for m in missing)
    return events.Warning(
        text=f"quorum: {members - len(missing)} of {members} bootstrap nodes give signs of life (none: {names});"
        f" round {round} waits, start one of them again"
    )


def against(effect: Refused | Skipped) -> events.Unfair | events.Warning:
    """What another node did that leads no more: it asked for votes for what it may not propose, or for what differs from what is seen
    here; or it let a round wait."""
    who = f"node {short_peer(effect.peer)}"
    if isinstance(effect, Skipped):
        return events.Warning(text=f"{who}: it leads and does not decide round {effect.round}; another node leads")
    if effect.unfair.accuses:
        return events.Unfair(peer=effect.peer, round=effect.round, reason=effect.unfair.reason)
    return events.Warning(
        text=f"{who}: its commit of round {effect.round} {effect.unfair.reason}; another node leads this round"
    )


def of_round(
    effect: Report | Moved | Resting | Accusation,
) -> events.Diverged | events.Moved | events.Warning | events.Quarrel:
    """A peer has other bits; blocks go from one stage of a chain to another; a peer is planned more rarely, since it does not do what it
    is planned for, or since its work was scored badly; a chain's member says that its neighbour lies."""
    match effect:
        case Report(round, peer, shard):
            return events.Diverged(peer=peer, round=round, shard=shard)
        case Moved(round, replica, before, after, reason):
            was, now = before.blocks, after.blocks
            return events.Moved(round=round, replica=replica, peers=after.peers, before=was, after=now, reason=reason)
        case Resting(peer, until, scored):
            what = "it is planned again and again and brings nothing that counts"
            what = "its work does not make the model better, as those found who scored it" if scored else what
            return events.Warning(text=f"peer {short_peer(peer)}: {what}; it is in no plan up to round {until}")
        case Accusation(accuser, accused, reason, out):
            return events.Quarrel(accuser=accuser, accused=accused, reason=reason, out=out)


def found(audits: Audits, commit: Commit) -> Iterable[events.Warning]:
    """What the audits of a commit say against whom; `audits`: before it."""
    for x in audits.found(commit):
        what = f"its work of round {x.round} is not what it says, as two found who trained it again"
        if x.examined:
            what = f"it trained work of round {x.round} again and found what two others did not find"
        yield events.Warning(text=f"peer {short_peer(x.peer)}: {what}")


def refusing(emit: events.Emit, directory: Directory) -> Callable[[events.Refused], None]:
    """Tells whom this node refuses: the operator here, and whoever monitors the run that there was somebody."""

    def tell(refused: events.Refused) -> None:
        emit(refused)
        directory.update(refused=directory.announcement.refused + 1)

    return tell


def is_news(known: Candidate | None, candidate: Candidate) -> bool:
    """Whether a peer offers something else than what was `known`, besides what is measured again and again."""
    if known is None:
        return True
    measured = {name: getattr(known, name) for name in ("speed_flops", "coordinates", "presence")}
    return known != dataclasses.replace(candidate, **measured)


def in_turn(peers: Iterable[str], ready: Mapping[str, Candidate]) -> list[str]:
    """Whom something is told first: strong uplinks, since who asks first passes a payload on to the others."""
    found = list(peers)
    random.shuffle(found)
    return sorted(found, key=lambda p: -ready[p].up_bps if p in ready else 0)
