"""A peer that the run's nodes refuse: it ends when the run's log says that it may not take part.

A node says no when the operators have banned the peer, or when the run is closed and the peer is not admitted (NotAdmitted). One node may
lie, so its word ends nothing. This peer ends when both hold:

    refused    as many of the nodes that decide rounds refuse it as a commit needs votes
    decided    the run's own log, which it reads and checks itself, says that it may not take part (protocol/ledger/access.py)

Then every honest node keeps it out until the operators decree otherwise, and asking again would be of no use. A peer whose invitation lets it
in waits for the commit that does so, and does not end. Where the nodes speak another version of the protocol, the log cannot be
asked; their votes alone decide.
"""

from __future__ import annotations

import asyncio

from peer.net.asking import page
from peer.net.network import Network
from protocol.errors import BannedError, ClosedError, RemoteError, UsageError, shown
from protocol.ledger import access, history
from protocol.ledger.board import members_after
from protocol.ledger.history import BadCommit
from protocol.run.manifest import Manifest
from protocol.wire.announcement import VERSION
from protocol.wire.commit import Commit, votes_needed
from protocol.wire.decree import Joined
from protocol.wire.session import NotAdmitted


class Refusals:
    """Of one peer. `joining`: the invitation that it shows; `run`: the run's address, as an operator types it."""

    def __init__(
        self,
        manifest: Manifest,
        network: Network,
        joining: Joined | None,
        run: str,
    ) -> None:
        self._manifest = manifest
        self._transport = network.transport
        self._directory = network.directory
        self._clock = network.clock
        self._joining = joining
        self._run = run
        self._by: dict[str, NotAdmitted] = {}
        self._heard = asyncio.Event()
        self._head: Commit | None = None
        self._access = access.of(manifest)

    def refused(self, node: str, word: NotAdmitted) -> None:
        """`node` opens no session with this peer, and says why."""
        self._by[node] = word
        self._heard.set()

    def taken(self, node: str) -> None:
        """`node` has a session with this peer."""
        self._by.pop(node, None)

    async def run(self) -> None:
        """Looks after every refusal whether it is final. Never returns. Raises BannedError, ClosedError, UsageError."""
        while True:
            await self._heard.wait()
            self._heard.clear()
            if self._are_enough(True):
                self._check_version()
            if self._are_enough(False) and await self._read() and self._are_enough(False):
                self._check()

    def _are_enough(self, version: bool) -> bool:
        """Whether so many nodes refuse this peer as decide a round: for its `version`, or since it is not admitted."""
        members = members_after(self._manifest, self._head)
        final = [n for n, word in self._by.items() if not word.waits and bool(word.version) == version]
        return len(set(final) & set(members)) >= votes_needed(len(members))

    async def _read(self) -> bool:
        """Reads what is new in the log, from whoever has it. Whether somebody had it to its end."""
        for node in self._directory.operators:
            try:
                while raws := await page(self._transport, node, -1 if self._head is None else self._head.round):
                    for raw in raws:
                        self._head = commit = history.follow(self._manifest, self._head, raw).commit
                        self._access = self._access.after(commit.decree, commit.joined)
                return True
            except (RemoteError, BadCommit):
                continue
        return False

    def _check(self) -> None:
        """Raises BannedError, ClosedError."""
        peer = self._transport.peer_id
        if self._access.why_not(peer) is None:
            return  # those who refuse it have not heard yet what was decreed
        time = self._clock.wall() if self._head is None else max(self._clock.wall(), self._head.time)
        why = access.why_kept_out(self._manifest, self._access, self._head, peer, self._joining, time)
        thing, typed = f"run {shown(self._manifest.name)}", f"potluck run admit {self._run} {peer}"
        if self._access.is_banned(peer):
            raise BannedError(f"{thing}: peer {peer}: {why}; ask an operator, who lets it in again with: {typed}")
        why = why or next(iter(self._by.values())).reason
        raise ClosedError(
            f"{thing}: peer {peer}: {shown(why)}; send this id to an operator, who types: {typed}, and join again; or ask for an"
            " invitation (potluck invite) and join with its line"
        )

    def _check_version(self) -> None:
        """Raises UsageError."""
        other = next(word.version for word in self._by.values() if word.version)
        if other != VERSION:
            way = "older" if other < VERSION else "newer"
            raise UsageError(
                f"run {shown(self._manifest.name)}: its nodes speak version {other} of the protocol, this is {VERSION}; install the version of"
                f" Potluck that the run has ({way} than this)"
            )
