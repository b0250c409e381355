"""Watches a run without taking part: reads the log of commits and the announcements, and tells them as events.

Every commit must have the votes of a majority and follow the one before it (protocol/rounds/paxos.py); an
announcement must be signed by its peer. The events are those of peer/events.py: commit, ready, gone, role, step, chain,
round, finished. What an announcement repeats reaches the DHT every few seconds only, so steps are a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from peer.events import Event, Sink, commit_fields
from peer.net.base import Transport, call, short
from peer.ui import utilization
from protocol.errors import RemoteError
from protocol.rounds import paxos
from protocol.run.manifest import Manifest
from protocol.wire import encoding, endpoints, framing, sealed
from protocol.wire.announcement import Announcement
from protocol.wire.commit import Commit
from protocol.wire.plan import Plan
from protocol.wire.schema import plain
from protocol.wire.session import LogRequest

POLL_SECONDS = 1.0
CALL_SECONDS = 20.0


class BadLog(RemoteError):
    """A bootstrap node sent a log that cannot be believed."""


@dataclass(slots=True)
class Monitor:
    """`commits`: the log so far; `peers`: the newest announcement of everyone who is there."""

    manifest: Manifest
    transport: Transport
    commits: list[Commit] = field(default_factory=list)
    peers: dict[str, Announcement] = field(default_factory=dict)

    async def follow(self, sink: Sink) -> None:
        """Polls and tells until the run is over. A node that does not answer is a warning, told once."""
        told = ""
        while True:
            try:
                await self.poll(sink)
                told = ""
            except RemoteError as error:
                if str(error) != told:
                    told = str(error)
                    sink(Event(time.time(), "monitor", "warning", {"text": told}))
            if self.finished:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def poll(self, sink: Sink) -> None:
        """One look at the log and at the announcements. Raises RemoteError, LocalError."""
        for commit in await self._new_commits():
            sink(Event(commit.time, "bootstrap", "commit", commit_fields(commit)))
            if commit.plan is not None:
                for event in _roles(commit.plan, commit.time):
                    sink(event)
        await self._announcements(sink)
        if self.finished:
            last = self.commits[-1]
            sink(Event(last.time, "bootstrap", "finished", {"round": last.round, "state_digest": None}))

    @property
    def finished(self) -> bool:
        """Whether the last round is committed."""
        return bool(self.commits) and self.commits[-1].round >= self.manifest.rounds

    async def snapshot(self) -> dict[str, Any]:
        """The run as plain data, as of now. Raises RemoteError, LocalError."""
        await self.poll(lambda event: None)
        plan = next((c.plan for c in reversed(self.commits) if c.plan is not None), None)
        head = self.commits[-1] if self.commits else None
        return {
            "run": self.manifest.run_id,
            "name": self.manifest.name,
            "time": time.time(),
            "round": 0 if head is None else head.round + (0 if self.finished else 1),
            "rounds": self.manifest.rounds,
            "finished": self.finished,
            "log_digest": head.digest if head else None,
            "plan": plain(plan) if plan is not None else None,
            "peers": [_peer(a, plan) for _, a in sorted(self.peers.items())],
            "bottlenecks": self._bottlenecks(plan),
            "commits": [
                {"time": c.time, "digest": c.digest, **{k: v for k, v in commit_fields(c).items() if k != "plan"}}
                for c in self.commits
            ],
        }

    def _bottlenecks(self, plan: Plan | None) -> list[dict[str, Any]]:
        """What each chain of `plan` waits for (peer/ui/utilization.py)."""
        out = []
        for index, replica in enumerate(plan.replicas if plan is not None else ()):
            reports = [a.chain if (a := self.peers.get(peer)) is not None else None for peer in replica.peers]
            found = utilization.bottleneck(
                [None if r is None else utilization.activity(utilization.fields(r)) for r in reports]
            )
            if found is not None and len(reports) > 1:
                peer = replica.peers[found.position]
                out.append({"replica": index, "peer": peer, "what": found.what, "share": round(found.share, 3)})
        return out

    async def snapshot_json(self) -> str:
        """`snapshot` as JSON text."""
        return json.dumps(await self.snapshot(), indent=1)

    async def _new_commits(self) -> list[Commit]:
        """The commits that the log has and we had not, from the first bootstrap node that answers, checked."""
        known = len(self.commits)
        *others, last = self.manifest.operators
        for node in others:
            with contextlib.suppress(RemoteError):
                await self._read_log(node)
                return self.commits[known:]
        await self._read_log(last)
        return self.commits[known:]

    async def _read_log(self, node: str) -> None:
        while True:
            ask = encoding.encode(LogRequest(after=self.commits[-1].round if self.commits else -1))
            reply = await call(self.transport, node, endpoints.LOG, ask, timeout=CALL_SECONDS)
            try:
                records = framing.unpack_message(reply)
            except framing.FrameError as error:
                raise BadLog(node, f"log of {short(node)}: {error}; ask another bootstrap node") from None
            if not isinstance(records, list) or not all(isinstance(raw, bytes) for raw in records):
                raise BadLog(node, f"log of {short(node)}: not a list of records; ask another bootstrap node")
            if not records:
                return
            for raw in records:
                self.commits.append(self._checked(node, raw))

    def _checked(self, node: str, raw: bytes) -> Commit:
        record = encoding.decode_record(raw, node)
        problem = paxos.problem(self.manifest, self.commits[-1] if self.commits else None, record)
        if problem is not None:
            raise BadLog(
                node,
                f"log of {short(node)}: commit of round {record.commit.round} {problem}; ask another bootstrap node",
            )
        return record.commit

    async def _announcements(self, sink: Sink) -> None:
        run, now = self.manifest.run_id, time.time()
        found: dict[str, Announcement] = {}
        for subkey, raw in (await self.transport.get(endpoints.announcements_key(run))).items():
            announcement = sealed.unseal_announcement(raw, subkey, run)
            if announcement is not None:
                found[subkey] = announcement
        for peer in sorted(set(self.peers) - set(found)):
            del self.peers[peer]
            sink(Event(now, "bootstrap", "gone", {"peer": peer}))
        for peer, new in sorted(found.items()):
            old = self.peers.get(peer)
            if old is not None and new.serial < old.serial:
                continue
            self.peers[peer] = new
            for event in _changes(old, new, now):
                sink(event)


def _changes(old: Announcement | None, new: Announcement, now: float) -> list[Event]:
    """What an announcement says that the one before it did not."""
    events = []
    ready = {"peer": new.peer, "memory_bytes": new.memory_bytes, "up_bps": new.up_bps, "device": new.device}
    if old is None:
        events.append(Event(now, "bootstrap", "ready", ready))
    if new.phase == "waiting" and new.bytes_sent and (old is None or old.bytes_sent != new.bytes_sent):
        sent = {"bytes_sent": new.bytes_sent, "bytes_received": new.bytes_received}
        events.append(Event(now, new.peer, "round", {"round": new.round, "seconds": {}, **sent}))
    step = ("round", "step", "loss", "phase")
    if old is None or any(getattr(old, name) != getattr(new, name) for name in step):
        loss = new.loss if new.phase == "training" else None
        fields = {"round": new.round, "step": new.step, "loss": loss, "phase": new.phase}
        events.append(Event(now, new.peer, "step", fields))
    if new.chain is not None and (old is None or old.chain != new.chain):
        measured = {"round": new.round, "step": new.step, **utilization.fields(new.chain)}
        events.append(Event(now, new.peer, "chain", measured))
    return events


def _roles(plan: Plan, when: float) -> list[Event]:
    events = []
    for index, replica in enumerate(plan.replicas):
        for position, stage in enumerate(replica.stages):
            fields = {
                "round": plan.round,
                "role": "full" if len(replica.stages) == 1 else "stage",
                "replica": index,
                "first": stage.first,
                "last": stage.last,
                "rank": replica.rank,
                "position": position,
                "stages": len(replica.stages),
            }
            events.append(Event(when, stage.peer, "role", fields))
    for peer in plan.spares:
        none = {"replica": None, "first": None, "last": None, "rank": None}
        events.append(Event(when, peer, "role", {"round": plan.round, "role": "spare", **none}))
    return events


def _peer(announcement: Announcement, plan: Plan | None) -> dict[str, Any]:
    """An announcement and the peer's place in the plan, as plain data."""
    data: dict[str, Any] = plain(announcement)
    data.pop("run")
    data["chain"] = utilization.fields(announcement.chain) if announcement.chain is not None else None
    replica = plan.replica_of(announcement.peer) if plan is not None else None
    role: dict[str, Any] = {"role": "waiting", "replica": replica, "first": None, "last": None, "rank": None}
    if plan is not None and replica is not None:
        spec = plan.replicas[replica]
        stage = spec.stage_of(announcement.peer)
        role |= {
            "role": "full" if len(spec.stages) == 1 else "stage",
            "first": stage.first,
            "last": stage.last,
        }
        role["rank"] = spec.rank
    elif plan is not None and announcement.peer in plan.spares:
        role["role"] = "spare"
    return data | role
