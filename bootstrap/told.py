"""What a bootstrap node tells, in words, and whom first."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping

from peer import events
from peer.net.directory import Directory
from protocol.identity import short_peer
from protocol.planning.partition import Candidate
from protocol.rounds import leader_events
from protocol.rounds.quarrels import Quarrel
from protocol.run import layout
from protocol.run.layout import ModelSpec


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


def resting(peer: str, until: int) -> events.Warning:
    """A peer is planned more rarely, since it does not do what it is planned for."""
    what = "it is planned again and again and brings nothing"
    return events.Warning(text=f"peer {short_peer(peer)}: {what}; it is in no plan up to round {until}")


def of(
    effect: leader_events.Moved | leader_events.Resting | Quarrel,
) -> events.Moved | events.Warning | events.Quarrel:
    """What plans do otherwise from now on: stages with other blocks, peers that are trusted less."""
    if isinstance(effect, leader_events.Moved):
        return moved(effect)
    if isinstance(effect, leader_events.Resting):
        return resting(effect.peer, effect.round)
    return events.Quarrel(accuser=effect.accuser, accused=effect.accused, reason=effect.reason, out=effect.out)


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


def moved(effect: leader_events.Moved) -> events.Moved:
    """A chain's stages get other numbers of blocks."""
    return events.Moved(
        round=effect.round,
        replica=effect.replica,
        peers=effect.after.peers,
        before=effect.before.blocks,
        after=effect.after.blocks,
        reason=effect.reason,
    )
