"""A volunteer's peer: puts its parts together, and owns their tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peer import events
from peer.chain.connect import PipelineStreams, UnreachablePeers
from peer.corpus.fetched import FetchedText, TextAccess, open_text
from peer.corpus.text import LocalText, Text, open_corpus
from peer.log.reader import Remote
from peer.net import bandwidth, reach
from peer.net.address import interface_hosts
from peer.net.base import Clock, Transport, cancel
from peer.net.directory import Directory
from peer.net.disk import Disk
from peer.net.latency import Latency
from peer.net.link_monitor import EARLIER, UNKNOWN, LinkMonitor, RateConfig, read_rates, write_rates
from peer.net.network import Network
from peer.net.reach import DialBackServer, Reachability, ReachMonitor
from peer.net.uplink import Uplink
from peer.node.config import JoinConfig, Machine
from peer.node.evaluating import Evaluator, Scorer
from peer.node.inner_loop import StageInnerLoop
from peer.node.pausing import SUPPLIES
from peer.node.rounds import Rounds
from peer.node.sessions import Operators, Refusals, Sessions
from peer.node.training import InnerLoop
from peer.state.payloads import Exchange
from peer.state.storage import Checkpoint, Storage
from peer.training import device, inference
from peer.training.trainer import make_worker
from protocol.errors import BannedError, ClosedError, LocalError, UsageError
from protocol.identity import Identity
from protocol.ledger.history import ForkError
from protocol.planning import budget, memory
from protocol.round import member_events
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import bounds, endpoints
from protocol.wire.announcement import Announcement, ChainReport
from protocol.wire.commit import Commit, Record
from protocol.wire.encoding import Message
from protocol.wire.schema import extend
from protocol.wire.session import Aggregated, Announced, ChainReconfig, Finished, Heartbeat, Offered, TakeSeat, TimeUp


async def run_text(manifest: Manifest, config: JoinConfig, access: TextAccess) -> Text:
    """The run's text. Raises UsageError, RemoteError."""
    if config.corpus is None:
        return await open_text(manifest, access)
    return LocalText(open_corpus(config.corpus, Disk(), manifest), manifest.seed_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factories:
    """The constructors of a peer's parts.

    supplies: the folder of the machine's power supplies (peer/node/pausing.py).
    line: wraps the transport.
    text: (manifest, config, access) -> the training text.
    inner_loop: called as `StageInnerLoop`.
    """

    clock: Clock = field(default_factory=Clock)
    supplies: Path = SUPPLIES
    line: Callable[[Transport], Transport] = lambda transport: transport
    text: Callable[[Manifest, JoinConfig, TextAccess], Awaitable[Text]] = run_text
    inner_loop: Callable[..., InnerLoop] = StageInnerLoop


class Peer:
    """One participant of a run."""

    def __init__(
        self,
        manifest: Manifest,
        identity: Identity,
        transport: Transport,
        storage: Storage,
        machine: Machine,
        emit: events.Emit,
        factories: Factories | None = None,
    ) -> None:
        self.manifest = manifest
        self.identity = identity
        self.bootstrap = bootstrap = machine.config.run.bootstrap
        """The addresses from the command line."""
        self.rounds: Rounds | None = None
        """None before the peer takes part."""
        self._factories = factories or Factories()
        self._transport = transport = self._factories.line(transport)
        self._storage = storage
        self._machine = machine
        self._config = config = machine.config
        self._hardware = hardware = machine.hardware
        self._emit = emit
        announcement = Announcement(
            run=manifest.run_id,
            peer=identity.peer_id,
            addresses=transport.addresses,
            reachable="" if machine.reached is None else machine.reached.how,
            memory_bytes=hardware.memory_bytes,
            host_bytes=hardware.host_bytes,
            up_bps=config.up_bps or 0,
            down_bps=config.down_bps or 0,
            device=device.name_of(hardware.devices),
            name=config.name,
        )
        self._directory = Directory(
            manifest, identity, transport, bootstrap, announcement, self._factories.clock, self._moved
        )
        if machine.reached is not None:
            self._directory.found(machine.reached.whole(identity.peer_id))
        uplink = Uplink(config.up_limit_bps)
        self._network = network = Network(transport, self._directory, self._factories.clock, emit, uplink)
        self._reach: ReachMonitor | None = None
        if machine.reached is not None:
            around = reach.reach_context(self._directory, transport, config.door.announce)
            self._reach = ReachMonitor(around, Reachability(how=machine.reached.how), self._reached)
        ticket = config.run.ticket
        joining = None if ticket is None else ticket.joined(identity.peer_id)
        typed = f"{bootstrap[0]}#{manifest.run_id}" if bootstrap else "RUN"
        self._refusals = Refusals(manifest, network, joining, typed)
        refusals = None if config.audit else self._refusals  # an auditor belongs to one node, and others may refuse it
        self.sessions = Sessions(network, joining, refusals)
        self._operators = Operators(manifest, network, self.sessions, bootstrap, self._head)
        transport.guests.follow(emit)
        self._latency = Latency(
            transport, self._factories.clock, self._directory.placed, random.Random(identity.peer_id)
        )
        known = UNKNOWN
        if None in (config.up_bps, config.down_bps):
            wall = self._factories.clock.wall()
            known = read_rates(storage.disk, config.folder, interface_hosts(), wall)
        most = bandwidth.probe_bytes(4 * layout.total_parameters(manifest.model))
        given = RateConfig(config.up_bps, config.down_bps, config.up_limit_bps, machine.downlink, known, most)
        self._link = LinkMonitor(given, network, random.Random(identity.peer_id), self._measured)

    async def rehearse(self) -> Announcement:
        """Prepares, without taking part. Returns what this machine would announce. Raises PotluckError."""
        text = await self._prepare()
        await text.aclose()
        return self._directory.announcement

    async def _prepare(self) -> Text:
        """Checks the memory, finds the operators, opens the text, measures the line. Raises PotluckError."""
        if not self._config.audit:
            self._check_memory()
        if budget.in_files(self.manifest, self._hardware.budget):
            self._storage.use_files()
        self._storage.free_memory = functools.partial(device.memory_budget, "cpu")
        await self._operators.find()
        text = await self._factories.text(self.manifest, self._config, self._access())
        try:
            if not self._link.is_configured:
                await self._link.measure()
                self._carries()
        except BaseException:
            await text.aclose()
            raise
        return text

    def _check_memory(self) -> None:
        """Raises UsageError where memory is too small for any part of the model."""
        room = self._hardware.budget
        smallest = budget.smallest_stage(self.manifest, room.device)
        if room.holds(smallest):
            return
        part = "one block of this model"
        if self.manifest.model.tie_word_embeddings:
            part = "the whole model, which has tied embeddings and no chains,"
        if room.is_split and smallest[0] <= room.memory_bytes:
            raise UsageError(
                f"memory: {(room.host_bytes or 0) / 1e6:.0f} MB of the host's are free beside the GPU, {part} needs"
                f" {smallest[1] / 1e6:.0f} MB of them; close other programs, or join a run with a smaller model"
            )
        needed = smallest[0] + (0 if room.is_split else smallest[1])
        raise UsageError(
            f"memory: {room.memory_bytes / 1e6:.0f} MB offered, {part} needs {needed / 1e6:.0f} MB;"
            " offer more with --memory, or join a run with a smaller model"
        )

    def _head(self) -> Commit | None:
        return None if self.rounds is None else self.rounds.member.commits.get(self.rounds.member.head)

    async def run(self) -> None:
        """Until the run is over. Raises PotluckError."""
        text = await self._prepare()
        try:
            await self._take_part(text)
        finally:
            await text.aclose()

    async def _take_part(self, text: Text) -> None:
        restored = await asyncio.to_thread(self._storage.load_checkpoint, self._network.warn)
        if restored is not None:
            self._emit(events.Restored(round=restored.round))
        unreachable = UnreachablePeers(self._directory.update, self._network.warn)
        pipes = PipelineStreams(self._network, unreachable=unreachable)
        inner_loop = self._factories.inner_loop(
            self.manifest,
            self.identity.peer_id,
            self._machine,
            text,
            pipes,
            self._directory.update,
            dict(restored.optimizer) if restored else {},
            self._follow,
        )
        exchange = Exchange(self.manifest, self._storage, self._network, fetches_states=not self._config.audit)
        rounds, evaluator = self._make_rounds(text, exchange, inner_loop, restored)
        self.rounds = rounds
        del restored  # it would keep this θ in memory as long as the run lasts
        await exchange.serve(text if isinstance(text, FetchedText) else None)
        await self._latency.serve()
        await DialBackServer(self._transport, self._factories.clock).serve()
        await self._transport.serve(endpoints.PIPE, lambda stream: pipes.serve(stream, rounds.member.applied))
        self._emit(
            events.Started(
                peer=self.identity.peer_id,
                pid=os.getpid(),
                device=device.name_of(self._hardware.devices),
                memory_bytes=self._hardware.memory_bytes,
                rss_bytes=device.peak_rss(),
            )
        )
        self._directory.update(phase="waiting")
        try:
            await self._work(rounds)
        finally:
            await evaluator.aclose()
            unreachable.close()
            await exchange.aclose()
            await asyncio.to_thread(inner_loop.close)
        shards = layout.shard_names(self.manifest.model)
        digests = {s: rounds.outer.digest(s) for s in shards if s in rounds.outer.theta}
        member = rounds.member
        self._emit(events.Finished(round=member.head if member.is_late else member.applied, digests=digests))

    def _access(self) -> TextAccess:
        disk, folder = self._storage.disk, self._storage.folder / "text"
        return TextAccess(network=self._network, folder=folder, limit=self._config.data_bytes, disk=disk)

    async def _tokenizer(self) -> bytes:
        return await Remote(self._transport, self._directory.operators, self._storage.blobs).tokenizer(self.manifest)

    def _make_rounds(
        self, text: Text, exchange: Exchange, inner_loop: InnerLoop, restored: Checkpoint | None
    ) -> tuple[Rounds, Evaluator]:
        manifest, identity, config, room = self.manifest, self.identity, self._config, self._hardware.budget
        audit, tell = config.audit, self.sessions.tell
        evaluator = Evaluator(
            manifest,
            identity,
            text,
            tell,
            self._emit,
            load=functools.partial(inference.Measured, wanted=self._hardware.device),
            tokenizer=self._tokenizer,
            worker=functools.partial(make_worker, config.threads),
            scorer=None if audit else Scorer(manifest, identity, text, tell, self._storage.blobs.get, exchange.bring),
            has_room=audit or budget.has_room_to_evaluate(manifest, room),
            always=audit,
        )
        rounds = Rounds(
            manifest=manifest,
            peer=identity.peer_id,
            restored=restored,
            network=self._network,
            sessions=self.sessions,
            operators=self._operators,
            storage=self._storage,
            exchange=exchange,
            inner_loop=inner_loop,
            evaluator=evaluator,
            emit=self._follow,
            threads=config.threads,
            abreast=memory.ABREAST if memory.on_gpu(room.device) and not self._storage.in_files else 1,
            up_bps=self._link.up_bps,
            warm=audit or budget.keeps_warm(manifest, room),
            whole=audit or budget.holds_whole(manifest, room),
        )
        return rounds, evaluator

    async def _work(self, rounds: Rounds) -> None:
        """Runs the rounds and all services beside them, until the rounds are over."""

        async def on_message(node: str, message: Message | Record) -> None:
            match message:
                case Record():
                    rounds.put(member_events.Committed(message))
                case Offered():
                    rounds.prefetch(node, message)
                case Aggregated():
                    rounds.exchange.named(node, message)
                case TimeUp() | TakeSeat() | ChainReconfig() | Finished() | Heartbeat():
                    rounds.put(member_events.Told(node, message))

        async def on_open() -> None:
            rounds.put(member_events.Connected())

        work = asyncio.create_task(rounds.run())
        services = [
            self._directory.announce(lambda sealed: self.sessions.tell(Announced(sealed=sealed))),
            self._directory.publish(),
            self._directory.watch(),
            self.sessions.run(on_message, on_open, rounds.member.is_news),
            self._latency.run(lambda: self._directory.reached),
            self._operators.run(),
            self._refusals.run(),
            *([] if self._link.is_configured else [self._link.run()]),
            *([] if self._reach is None else [self._reach.run()]),
        ]
        background = [asyncio.create_task(service) for service in services]
        try:
            await asyncio.wait({work, *background}, return_when=asyncio.FIRST_COMPLETED)
            for task in (work, *background):
                if task.done():
                    task.result()
        except (BannedError, ClosedError):
            rounds.gives = False
            raise
        except ForkError as error:
            raise LocalError(
                f"history of the run: {error}; stopped without applying either, tell the operator"
            ) from None
        finally:
            try:
                work.cancel()  # before the sessions end: it tells the nodes that it leaves
                await asyncio.wait({work})
            finally:
                await cancel(work, *background)

    def _moved(self, addresses: Sequence[str]) -> None:
        self._network.warn(
            f"network: this machine's addresses changed; from now on others reach it at {', '.join(addresses)}"
        )
        if self._reach is not None:
            self._reach.changed()

    def _reached(self, found: Reachability) -> None:
        self._emit(events.Reachable(how=found.how, addresses=found.addresses, asked=found.asked))
        self._directory.update(reachable=found.how)
        self._directory.found(found.whole(self.identity.peer_id))

    def _measured(self, body: events.Body) -> None:
        self._emit(body)
        self._carries()
        if isinstance(body, events.Measured) and body.by != EARLIER:
            wall = self._factories.clock.wall()
            write_rates(self._storage.disk, self._config.folder, self._link.found, interface_hosts(), wall)

    def _carries(self) -> None:
        self._directory.update(up_bps=self._link.up_bps, down_bps=self._link.down_bps)
        if self.rounds is not None:
            self.rounds.set_uplink(self._link.up_bps)

    def _follow(self, body: events.Body) -> None:
        """Emits, and repeats in the announcement what it has of it."""
        if isinstance(body, events.Round):
            body = dataclasses.replace(body, peak_rss_bytes=device.peak_rss())
        self._emit(body)
        match body:
            case events.Chain():
                self._directory.update(chain=extend(ChainReport, body))
            case events.Role(role="full"):
                self._directory.update(chain=None)
            case events.Step(round=round, step=step, loss=loss):
                self._directory.update(phase="training", round=round, step=step, loss=bounds.reportable_loss(loss))
            case events.Offered(round=round):
                self._directory.update(phase="offered", round=round)
            case events.Withdrew(round=round):
                self._directory.update(phase="withdrew", round=round)
            case events.Round() as done:
                self._directory.update(
                    phase="waiting",
                    round=done.round,
                    bytes_sent=done.bytes_sent,
                    bytes_received=done.bytes_received,
                    bytes_written=done.bytes_written,
                )
