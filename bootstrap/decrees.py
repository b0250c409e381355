"""The call with which operators change who may take part in a run (protocol/ledger/access.py), and how long it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bootstrap.calls import MAX_REQUEST
from peer.net.base import Transport, serve_calls
from protocol.errors import RemoteError
from protocol.identity import short_peer
from protocol.ledger import access, board, schedule
from protocol.round.leader import Leader
from protocol.round.leader_events import DecreeSigned
from protocol.wire import encoding, endpoints
from protocol.wire.commit import votes_needed
from protocol.wire.decree import Decree, Motion, Motions
from protocol.wire.encoding import unseal_signed


class Decrees:
    """Answers from the `leader`'s machine; `hand_in(event)` gives it an event, and is awaited; `spread(motion)` tells the other operators' nodes.
    `living()`: the operators that give signs of life, as the quorum's machine says. `tell(text)`: this node's operator reads it."""

    def __init__(
        self,
        leader: Leader,
        hand_in: Callable[[DecreeSigned], Awaitable[None]],
        spread: Callable[[Motion], None],
        living: Callable[[], frozenset[str]],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._leader = leader
        self._hand_in = hand_in
        self._spread = spread
        self._living = living
        self._tell = tell
        self._told: tuple[Decree | None, tuple[str, ...]] = (None, ())

    async def serve(self, transport: Transport) -> None:
        """Lets others call."""
        await serve_calls(transport, endpoints.DECREES, self.moved, limit=MAX_REQUEST)

    async def moved(self, remote: str, request: bytes) -> bytes:
        motion = encoding.expect(Motion, encoding.decode(request, remote), remote)
        decree = await self.hear(motion) if motion.sealed else None
        if decree is not None and not self._is_past(decree):
            self._spread(motion)
        manifest, head = self._leader.manifest, self._leader.head
        answer = Motions(
            number=access.decrees_after(head),
            schedule=schedule.of(manifest, head),
            board=board.of(manifest, head),
            wanted=votes_needed(len(board.members_after(manifest, head))),
            signed=() if decree is None else self._leader.petitions.signers(decree),
            newest=self._leader.access.newest,
        )
        return encoding.encode(answer)

    async def hear(self, motion: Motion) -> Decree:
        """What an operator has signed, and its machine knows now. Raises RemoteError."""
        operator, message, signature = unseal_signed(motion.sealed)
        decree, manifest = encoding.expect(Decree, message, operator), self._leader.manifest
        if self._is_past(decree):
            return decree  # it was decided, and its signer asks whether it was, who may be no operator any more
        if operator not in board.members_after(manifest, self._leader.head):
            raise RemoteError(operator, f"{short_peer(operator)} is not among the operators who decide rounds now")
        if decree.run != manifest.run_id:
            raise RemoteError(operator, "that decree is of another run")
        if not access.is_signed(
            operator, decree, signature
        ):  # in another form, such as with fields that are not known here
            raise RemoteError(operator, "that decree is signed in a form that no commit has")
        if not decree.is_sound:
            raise RemoteError(operator, "that decree says nothing")
        refused = self._why_not(decree)
        if refused is not None:
            raise RemoteError(operator, f"that decree cannot be: {refused}")
        await self._hand_in(DecreeSigned(operator, decree, signature))
        self._say(decree)
        return decree

    def _say(self, decree: Decree) -> None:
        """Tells the operator once what waits for others to sign it, too."""
        known = decree, self._leader.petitions.signers(decree)
        wanted = votes_needed(len(board.members_after(self._leader.manifest, self._leader.head)))
        if known == self._told or len(known[1]) >= wanted:
            return
        self._told = known
        signers = ", ".join(map(short_peer, known[1]))
        self._tell(
            f"decree {decree.action}: {len(known[1])} of {wanted} operators have signed it ({signers}); it waits for others"
        )

    def _is_past(self, decree: Decree) -> bool:
        """Whether the run has had as many decrees as this one comes after."""
        return decree.number < access.decrees_after(self._leader.head)

    def _why_not(self, decree: Decree) -> str | None:
        """Why it cannot come next, as far as this node knows."""
        manifest, head = self._leader.manifest, self._leader.head
        if decree.schedule is not None:
            return schedule.why_not(manifest, head, decree.schedule)
        if decree.action in board.CHANGES:
            refused = board.why_not(manifest, head, decree)
            return refused or board.why_too_few(manifest, head, decree, self._living())
        return None
