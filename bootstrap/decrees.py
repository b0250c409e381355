"""The call with which operators change who may take part in a run (protocol/rounds/access.py), and how long it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bootstrap.calls import MAX_REQUEST
from peer.net.base import Transport, serve_calls
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.rounds import access, schedule
from protocol.rounds.leader import Leader
from protocol.rounds.leader_events import Petition
from protocol.wire import encoding, endpoints
from protocol.wire.commit import votes_needed
from protocol.wire.decree import Decree, Motion, Motions
from protocol.wire.sealed import unseal_signed


class Decrees:
    """Answers from the `leader`'s machine; `hand_in(event)` gives it an event, and is awaited; `spread(motion)` tells the other operators' nodes."""

    def __init__(
        self, leader: Leader, hand_in: Callable[[Petition], Awaitable[None]], spread: Callable[[Motion], None]
    ) -> None:
        self._leader = leader
        self._hand_in = hand_in
        self._spread = spread

    async def serve(self, transport: Transport) -> None:
        """Lets others call."""
        await serve_calls(transport, endpoints.DECREES, self._moved, limit=MAX_REQUEST)

    async def _moved(self, remote: str, request: bytes) -> bytes:
        motion = encoding.expect(Motion, encoding.decode(request, remote), remote)
        decree = await self.hear(motion) if motion.sealed else None
        if decree is not None:
            self._spread(motion)
        head = self._leader.head
        answer = Motions(
            number=access.decrees_after(head),
            schedule=schedule.of(self._leader.manifest, head),
            wanted=votes_needed(len(access.members_after(self._leader.manifest, head))),
            signed=() if decree is None else self._leader.petitions.signers(decree),
            newest=self._leader.access.newest,
        )
        return encoding.encode(answer)

    async def hear(self, motion: Motion) -> Decree:
        """What an operator has signed, and its machine knows now. Raises RemoteError."""
        operator, message, signature = unseal_signed(motion.sealed)
        decree, manifest = encoding.expect(Decree, message, operator), self._leader.manifest
        if operator not in access.members_after(manifest, self._leader.head):
            raise RemoteError(operator, f"{short_peer(operator)} is not among the operators who decide rounds now")
        if decree.run != manifest.run_id:
            raise RemoteError(operator, "that decree is of another run")
        if not access.is_signed(
            operator, decree, signature
        ):  # in another form, such as with fields that are not known here
            raise RemoteError(operator, "that decree is signed in a form that no commit has")
        if not decree.is_sound:
            raise RemoteError(operator, "that decree says nothing")
        if decree.schedule is not None:
            refused = schedule.why_not(manifest, self._leader.head, decree.schedule)
            if refused is not None:
                raise RemoteError(operator, f"that decree cannot be: {refused}")
        await self._hand_in(Petition(operator, decree, signature))
        return decree
