"""A volunteer's daemon: wires presence, rounds, storage and the computing engine together, and owns their tasks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from peer import chains, data, pipeline, resources, trace, trainer
from peer.config import JoinConfig
from peer.events import Emitter
from peer.exchange import Exchange
from peer.net.base import Stream, Transport
from peer.net.blobs import fetch_named
from peer.presence import Directory, Sessions
from peer.rounds import Result, Rounds
from peer.stats import Statistics
from peer.storage import Shards, Storage
from protocol import assign, framing, layout, member, planner, schema, subspace, wire
from protocol.errors import LocalError, PotluckError, RemoteError, UsageError
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import Announcement, Finished, Message, Offered, Plan, Record, StageSpec

PIPE_TIMEOUT = 60.0
"""Seconds without a frame after which a chain's neighbour counts as gone (a dead process is noticed at once)."""
DIAL_SECONDS = 30.0
MAX_PIPES = 16
AHEAD = 3
"""A neighbour may be one commit ahead of us, and train one round ahead of that."""
SOFT_DEADLINE = 0.8
"""Share of the round's deadline after which a replica offers the steps that it has."""


class Engine:
    """Trains what the plan says; remembers the optimizer's state from round to round."""

    def __init__(
        self,
        manifest: Manifest,
        peer: str,
        transport: Transport,
        corpus: data.Corpus,
        config: JoinConfig,
        reach: Callable[[str], object],
        optimizer: dict[str, NDArray[np.generic]],
        emit: Callable[..., None],
    ) -> None:
        self.manifest = manifest
        self._emit = emit
        self._trace = trace.TraceFile(config.trace, peer) if config.trace is not None else None
        self.peer = peer
        self._transport = transport
        self._corpus = corpus
        self._config = config
        self._reach = reach
        self._state = optimizer
        self._worker: ThreadPoolExecutor = trainer.make_worker(config.threads)
        self._trainer: trainer.StageTrainer | None = None
        self._shape: tuple[object, ...] = ()
        self._depth: tuple[object, int] = ((), 0)  # a chain's stages, and the depth of its last inner step
        self._basis: NDArray[np.float32] | None = None
        self._incoming: dict[tuple[int, int, str], asyncio.Future[Stream]] = {}
        self._round_over = asyncio.Event()
        self._training = False
        self._statistics = Statistics()

    def close(self) -> None:
        """Ends the worker thread and the trace."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        if self._trace is not None:
            self._trace.close()

    def displacement(self, shard: str) -> list[tuple[NDArray[np.float32], NDArray[np.float32] | None]]:
        """θ(r-1) - θ local of a shard that was just trained, as pairs (peer/model/stage.py)."""
        assert self._trainer is not None
        return self._trainer.displacement(shard)

    def release(self) -> None:
        """Forgets the θ that was trained from: `displacement` is not asked for any more."""
        if self._training:
            raise AssertionError("θ is released while it is trained from; this is a bug")
        if self._trainer is not None:
            self._trainer.release()

    def optimizer(self) -> dict[str, NDArray[np.generic]]:
        """AdamW's moments, by parameter name; for any thread but the worker. They are copies while a round is trained."""
        trainer = self._trainer
        if trainer is None:
            return self._state
        return dict(self._worker.submit(trainer.optimizer_state, copy=self._training).result())

    async def train(
        self,
        plan: Plan,
        replica: int,
        theta: Shards,
        stop: asyncio.Event,
        progress: Callable[[int, float | None], None],
    ) -> Result:
        """Inner steps of one round. Errors become the result's `error`: the replica sits out, nobody else notices."""
        spec = plan.replicas[replica]
        position = spec.peers.index(self.peer)
        train = self.manifest.train
        first_step = (plan.round - 1) * train.inner_steps + 1
        soft = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(SOFT_DEADLINE * self.manifest.timing.round_deadline, soft.set)
        reports: list[pipeline.StepReport] = []

        def on_step(report: pipeline.StepReport) -> None:
            reports.append(report)
            self._depth = (spec.stages, report.depth)
            if self._trace is not None:
                self._trace.flush()
            if len(spec.stages) > 1:
                measured = {
                    name: x for name, x in schema.plain(report).items() if name not in ("loss", "norm", "tokens")
                }
                self._emit("chain", round=plan.round, **measured)
            progress(report.step - first_step + 1, report.loss)

        def windows(step: int) -> NDArray[np.int64]:
            at = assign.slots(plan.slot, replica, step - first_step, train.inner_steps, train.step_rows)
            numbers = assign.windows(self.manifest.seed_bytes, self._corpus.n_windows, at)
            return self._corpus.train_windows(numbers)

        class Either:
            def is_set(self) -> bool:
                return stop.is_set() or soft.is_set()

        streams: list[Stream] = []
        error = None
        self._training = True
        try:
            await self._prepare(spec.stages[position], spec.k, theta)
            assert self._trainer is not None
            last = position + 1 == len(spec.stages)
            following = None if last else await self._unless(stop, self._dial(plan, replica, position))
            streams += [following] if following else []
            previous = await self._unless(stop, self._accept(plan, replica, position)) if position else None
            streams += [previous] if previous else []
            stage = spec.stages[position]
            plain, most = planner.depths(self.manifest, stage.first, stage.last, self._config.memory_bytes)
            await pipeline.run_steps(
                self._trainer,
                self._worker,
                first_step=first_step,
                steps=train.inner_steps,
                wires=(self.manifest.chains.forward, self.manifest.chains.backward),
                timeout=PIPE_TIMEOUT,
                previous=previous,
                following=following,
                windows=windows,
                depth=self._depth[1] if self._depth[0] == spec.stages else planner.window(self.manifest),
                plain_depth=plain,
                most_depth=most,
                stop=Either(),
                on_step=on_step,
                trace=self._trace,
                statistics=self._statistics,
            )
            if stop.is_set():
                error = "the round was decided before all steps were done"
        except PotluckError as failure:
            error = str(failure)
            self._depth = ((), 0)  # a member may hold less than it did
        finally:
            self._training = False
            timer.cancel()
            for stream in streams:
                with contextlib.suppress(PotluckError):
                    await stream.close()
            self._forget(plan.round)
        tokens = len(reports) * train.step_tokens
        return Result(
            steps=len(reports),
            tokens=tokens,
            loss=reports[0].loss if reports else None,
            error=error if reports or error else "no step was done",
            forward_bytes=sum(r.forward_bytes for r in reports),
            backward_bytes=sum(r.backward_bytes for r in reports),
            boundary_tokens=tokens if len(spec.stages) > 1 else 0,
        )

    async def _prepare(self, stage: StageSpec, k: int, theta: Shards) -> None:
        """A trainer for this stage with the optimizer state that is still of use, at θ(r-1)."""
        shards = planner.stage_shards(self.manifest, stage.first, stage.last)
        if (shards, k) != self._shape:
            self._state = {**self._state, **self.optimizer()}
            self._trainer = None
            if k and self._basis is None:
                self._basis = await asyncio.to_thread(
                    subspace.basis,
                    self.manifest.seed_bytes,
                    self.manifest.model.d_model,
                    max(self.manifest.chains.k),
                )

            def build() -> trainer.StageTrainer:
                made = trainer.StageTrainer(
                    self.manifest.model,
                    self.manifest.train,
                    shards,
                    k=k,
                    basis=self._basis if k else None,
                    device=self._config.device,
                )
                made.load_optimizer(self._state)
                return made

            self._trainer = await asyncio.get_running_loop().run_in_executor(self._worker, build)
            self._shape = (shards, k)
            self._state = {}
        assert self._trainer is not None
        await asyncio.get_running_loop().run_in_executor(self._worker, self._trainer.begin_round, theta)

    # --- streams between neighbours: the earlier stage dials

    async def _unless(self, stop: asyncio.Event, work: Coroutine[None, None, Stream]) -> Stream:
        """`work`, which is given up when the round is over. Raises LocalError then."""
        task, over = asyncio.create_task(work), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise LocalError("the round was decided before its chain was complete")
            return task.result()
        finally:
            for one in (task, over):
                one.cancel()
            await asyncio.gather(task, over, return_exceptions=True)

    async def _dial(self, plan: Plan, replica: int, position: int) -> Stream:
        peer = plan.replicas[replica].stages[position + 1].peer
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                while True:
                    try:
                        await self._reach(peer)  # type: ignore[misc]
                        stream = await self._transport.open(peer, wire.PIPE, timeout=DIAL_SECONDS)
                        break
                    except RemoteError:
                        await asyncio.sleep(0.5)
        except TimeoutError:
            raise pipeline.ChainBroken(peer, f"did not answer for {DIAL_SECONDS:g} s") from None
        hello = {"round": plan.round, "replica": replica}
        await stream.send(framing.pack_message(hello))
        return stream

    async def _accept(self, plan: Plan, replica: int, position: int) -> Stream:
        peer = plan.replicas[replica].stages[position - 1].peer
        waiting = self._expect((plan.round, replica, peer))
        try:
            async with asyncio.timeout(DIAL_SECONDS + PIPE_TIMEOUT):
                return await waiting
        except TimeoutError:
            raise pipeline.ChainBroken(peer, "did not dial") from None

    def _expect(self, key: tuple[int, int, str]) -> asyncio.Future[Stream]:
        if key not in self._incoming:
            self._incoming[key] = asyncio.get_running_loop().create_future()
        return self._incoming[key]

    def _forget(self, round: int) -> None:
        """Ends the handlers of the pipes of `round` and of earlier rounds."""
        for key in [k for k in self._incoming if k[0] <= round]:
            self._incoming.pop(key).cancel()
        self._round_over.set()
        self._round_over = asyncio.Event()

    async def on_pipe(self, stream: Stream, applied: int) -> None:
        """Serves an incoming pipe: hands the stream to the training that waits for it, and stays until that is over."""
        hello = framing.unpack_message(bytes(await stream.recv(256)))
        round, replica = hello.get("round"), hello.get("replica")
        if not isinstance(round, int) or not isinstance(replica, int) or not applied < round <= applied + AHEAD:
            raise RemoteError(stream.remote, f"pipe of {stream.remote[-8:]}: not for this round; it was closed")
        if len(self._incoming) >= MAX_PIPES:
            raise RemoteError(stream.remote, f"pipe of {stream.remote[-8:]}: too many wait here; it was closed")
        waiting = self._expect((round, replica, stream.remote))
        if waiting.done():
            raise RemoteError(stream.remote, f"pipe of {stream.remote[-8:]}: there is one already; it was closed")
        waiting.set_result(stream)
        while (round, replica, stream.remote) in self._incoming:
            await self._round_over.wait()


async def join(
    manifest: Manifest,
    identity: Identity,
    transport: Transport,
    storage: Storage,
    config: JoinConfig,
    bootstrap: Sequence[str],
    emit: Emitter,
) -> None:
    """Takes part in a run until it is over. Raises PotluckError."""
    smallest = planner.smallest_stage(manifest)
    if config.memory_bytes < smallest:
        raise UsageError(
            f"memory: {config.memory_bytes / 1e6:.0f} MB offered, one block of this model needs {smallest / 1e6:.0f} MB;"
            " offer more with --memory, or join a run with a smaller model"
        )
    tokenizer = await fetch_tokenizer(manifest, transport, storage)
    corpus = await asyncio.to_thread(
        data.prepare,
        manifest.data,
        data.load_tokenizer(tokenizer, manifest.tokenizer.digest),
        manifest.train.sequence,
        data.cache_folder(),
        manifest.model.vocab_size,
    )
    announcement = Announcement(
        run=manifest.run_id,
        peer=identity.peer_id,
        addresses=transport.addresses,
        memory_bytes=config.memory_bytes,
        up_bps=config.up_bps,
        down_bps=config.down_bps,
        device=config.device,
    )
    directory = Directory(manifest, identity, transport, bootstrap, announcement)
    sessions = Sessions(directory, transport, emit)

    def follow(kind: str, **fields: object) -> None:
        """Everything that is emitted, and the part of it that the announcement repeats."""
        if kind == "round":
            fields["peak_rss_bytes"] = resources.peak_rss()
        emit(kind, **fields)
        if kind == "chain":
            directory.update(chain=chains.announced(fields))
        elif kind == "role" and fields["role"] != "stage":
            directory.update(chain=None)
        elif kind == "step":
            directory.update(phase="training", round=fields["round"], step=fields["step"], loss=fields["loss"])
        elif kind in ("offered", "withdrew"):
            directory.update(phase=kind, round=fields["round"])
        elif kind == "round":
            directory.update(
                phase="waiting",
                round=fields["round"],
                bytes_sent=fields["bytes_sent"],
                bytes_received=fields["bytes_received"],
            )

    restored = await asyncio.to_thread(storage.load_checkpoint, lambda text: emit("warning", text=text))
    if restored is not None:
        emit("restored", round=restored.round)
    engine = Engine(
        manifest,
        identity.peer_id,
        transport,
        corpus,
        config,
        directory.reach,
        dict(restored.optimizer) if restored else {},
        follow,
    )
    exchange = Exchange(
        manifest,
        transport,
        storage.blobs,
        emit,
        reach=directory.reach,
        peers=directory.peers,
        find=storage.find,
        states=storage.states,
        up_limit_bps=config.up_limit_bps,
    )
    rounds = Rounds(
        manifest,
        identity.peer_id,
        transport,
        storage,
        engine,
        follow,  # type: ignore[arg-type]
        exchange=exchange,
        tell=sessions.tell,
        restored=restored,
        threads=config.threads,
    )

    async def on_message(message: Message | Record) -> None:
        if isinstance(message, Record):
            rounds.put(member.Committed(message))
        elif isinstance(message, Offered):
            rounds.prefetch(message)
        elif isinstance(message, Finished):
            rounds.put(member.RunOver())

    async def on_open() -> None:
        rounds.put(member.Connected())

    await exchange.serve()
    await transport.serve(wire.PIPE, lambda stream: engine.on_pipe(stream, rounds.member.applied))
    emit(
        "started",
        peer=identity.peer_id,
        pid=os.getpid(),
        device=config.device,
        memory_bytes=config.memory_bytes,
        rss_bytes=resources.peak_rss(),
    )
    directory.update(phase="waiting")
    background = [
        asyncio.create_task(directory.announce()),
        asyncio.create_task(sessions.run(on_message, on_open)),
    ]
    work = asyncio.create_task(rounds.run())
    try:
        done, _ = await asyncio.wait({work, *background}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except member.ForkError as error:
        raise LocalError(f"history of the run: {error}; stopped without applying either, tell the operator") from None
    finally:
        for task in (work, *background):
            task.cancel()
        await asyncio.gather(work, *background, return_exceptions=True)
        await exchange.aclose()
        await asyncio.to_thread(engine.close)
    digests = {s: rounds.outer.digest(s) for s in layout.shard_names(manifest.model) if s in rounds.outer.theta}
    emit("finished", round=rounds.member.applied, digests=digests)


async def fetch_tokenizer(manifest: Manifest, transport: Transport, storage: Storage) -> bytes:
    """The run's tokenizer: from our disk, or by its name from a bootstrap node. Raises RemoteError."""
    found = storage.load_tokenizer(manifest.tokenizer.digest)
    if found is None:
        node = manifest.operators[0]
        found = await fetch_named(transport, node, wire.TOKENIZER_NAME, limit=wire.MAX_TOKENIZER)
        if hashlib.sha256(found).hexdigest() != manifest.tokenizer.digest:
            raise RemoteError(node, f"tokenizer from {node[-8:]}: not the run's; tell the operator")
        await asyncio.to_thread(storage.save_tokenizer, found)
    return found
