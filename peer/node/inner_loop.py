"""The computing part of a peer: the inner steps of a round, alone or in a chain, and in the repaired chains that
follow. Its errors are the result of a round, and never end the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from peer import events
from peer.chain import pipeline, reading, trace
from peer.chain.connect import PipelineStreams
from peer.chain.grad_norm import Costs, StageProgress, StepReport, catch_up
from peer.chain.neighbours import Statistics
from peer.chain.reading import StopSign
from peer.chain.screening import Place, Screens
from peer.corpus.text import Text
from peer.net.base import Stream, cancel, until
from peer.node.config import Machine
from peer.node.training import ChainOrders, InnerLoop, Result
from peer.state.outer_optimizer import Accumulate
from peer.state.storage import Shards
from peer.training import device, trainer
from peer.training import moments as small_moments
from peer.training.optimizer import Pace
from peer.training.several_devices import SeveralDevicesTrainer
from peer.training.sharded import RankLost, ShardedTrainer
from protocol.errors import LocalError, PotluckError
from protocol.ledger import schedule
from protocol.planning import budget, memory, pipeline_model
from protocol.planning.partition import Speedometer
from protocol.round.chain_repair import SLOW
from protocol.round.member_events import TrainOrder
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.plan import ReplicaSpec, StageSpec
from protocol.wire.schema import extend

STUCK_SECONDS = 60.0
"""Without the expected frame, after which a chain's neighbour counts as lost, even with signs of life
(peer/chain/link.py)."""
SHORTAGE = 0.9
"""The part of the offered memory that is offered after it ran out, at most."""
COMPARED_STEPS = 32
"""Inner steps that are compared to find a stage that has become slow."""


class StageInnerLoop(InnerLoop):
    """Trains a stage by its plan; keeps the optimizer's state from round to round.

    pipes: to the neighbours in a chain.
    announce: changes fields of the peer's announcement.
    optimizer: the optimizer's state by parameter name.
    """

    trainer_class: type[trainer.StageTrainer] = trainer.StageTrainer
    joined = staticmethod(budget.joined)
    """The number of a full replica's micro-batches that are computed as one."""

    def __init__(
        self,
        manifest: Manifest,
        peer: str,
        machine: Machine,
        text: Text,
        pipes: PipelineStreams,
        announce: Callable[..., None],
        optimizer: dict[str, NDArray[np.generic]],
        emit: events.Emit,
    ) -> None:
        self.manifest = manifest
        self._emit = emit
        self._trace = trace.TraceFile(machine.config.trace, peer) if machine.config.trace is not None else None
        self.peer = peer
        self._pipes = pipes
        self._text = text
        self._threads, self._folder = machine.config.threads, machine.config.folder
        self._hardware, self._site = machine.hardware, machine.site
        self._state = optimizer
        self._inherited: dict[str, bytes] = {}
        self._worker: ThreadPoolExecutor = trainer.make_worker(self._threads)
        self._trainer: trainer.StageTrainer | None = None
        self._shape: tuple[str, ...] = ()
        self._budget = machine.hardware.budget  # less after a shortage
        # a chain's stages, the depth of its last inner step, and what that took
        self._last_step: tuple[object, int, Costs | None] = ((), 0, None)
        # a chain's stages, and their seconds of a micro-batch in each of its last inner steps
        self._stage_seconds: tuple[object, deque[tuple[float, ...]]] = ((), deque())
        self._announce = announce
        self._speed = Speedometer(manifest)
        self._training = False
        self._warned = False  # of pieces in this round
        self._joins = True  # until memory ran out
        self._statistics, self._screens = Statistics(), Screens()
        self._closing: set[asyncio.Task[None]] = set()

    def expect(self, slots: Sequence[range]) -> None:
        self._text.expect(slots)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        if self._trainer is not None:
            self._trainer.close()
        if self._trace is not None:
            self._trace.close()

    def displacement(self, shard: str) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        assert self._trainer is not None
        return self._trainer.displacement(shard)

    def on_device(self, shard: str) -> Accumulate | None:
        assert self._trainer is not None
        return self._trainer.on_device(shard)

    def release(self) -> None:
        if self._training:
            raise AssertionError("θ is released while it is trained from; this is a bug")
        if self._trainer is not None:
            self._trainer.release()

    def optimizer(self) -> dict[str, NDArray[np.generic]]:
        """As InnerLoop; for any thread but the worker. Copies while a round is trained."""
        trainer = self._trainer
        if trainer is None:
            return self._state
        return dict(self._worker.submit(trainer.optimizer_state, copy=self._training).result())

    def lacks_moments(self, shard: str) -> bool:
        known = any(f"{name}/step" in self._state for name, _ in layout.tensors(self.manifest.model, shard))
        return not known and shard not in self._inherited and not (self._trainer and self._trainer.has_moments(shard))

    async def moments(self, shard: str) -> bytes | None:
        trainer = self._trainer
        if trainer is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._worker, trainer.moments, shard)

    def inherit(self, shard: str, moments: bytes) -> None:
        small_moments.unpack(self.manifest.model, self.manifest.train, shard, moments)
        self._inherited[shard] = moments

    async def train(
        self,
        order: TrainOrder,
        theta: Shards,
        stop: asyncio.Event,
        end: StopSign,
        progress: Callable[[int, float | None], None],
        chain_orders: ChainOrders,
    ) -> Result:
        """As InnerLoop. Errors become the result's `error`. A chain that loses a member waits for the next order, and
        goes on."""
        plan, train = order.plan, self.manifest.train
        spec = plan.replica(order.replica)
        position = spec.peers.index(self.peer)
        stage_progress, reports = StageProgress(), list[StepReport]()
        pace = self._pace(order, spec)
        first_step = pace.before + 1

        def on_step(report: StepReport) -> None:
            reports.append(report)
            stages = order.plan.replica(order.replica).stages
            self._last_step = (stages, report.depth, report.took)
            slow = self._slow_stage(stages, report, spec.work.micro_batches)
            if slow is not None:
                chain_orders.failed(order.generation, slow, SLOW)
            stage = stages[position]
            self._warn_of_pieces()
            seconds = report.seconds_per_microbatch / pace.joined
            self._announce(speed_flops=self._speed.add(stage.first, stage.last, seconds))
            if self._trace is not None:
                self._trace.flush()
            if spec.is_chain:
                self._emit(extend(events.Chain, report, round=plan.round))
            progress(report.step - first_step + 1, report.loss)

        error = None
        self._training, self._warned = True, False
        try:
            await self._prepare(spec.stages[position], pace, theta)
            assert self._trainer is not None
            while not order.steps:
                chain = self._chain(order, position, stage_progress, stop, end, on_step, chain_orders)
                newer = await self._unless_reconfigured(chain, order.generation, stop, chain_orders)
                if newer is None:
                    break
                order = newer
            else:
                stage_progress.summed = (
                    stage_progress.summed and stage_progress.total.steps == order.steps
                )  # else the norm is unknown
                best = dataclasses.replace(stage_progress.total, steps=order.steps)
                await catch_up(self._trainer, self._worker, stage_progress, best, first_step)
            if stop.is_set():
                error = "the round was decided before all steps were done"
        except (PotluckError, MemoryError, RuntimeError, ExceptionGroup) as failure:
            error = await self._why_it_ended(failure, spec.stages[position], spec.is_chain, stage_progress)
            self._last_step = ((), 0, None)  # a member may hold less than it did
        finally:
            self._pipes.forget(plan.round + 1)
            # weights are at rest then; what the outer step needs takes the place of activations
            await asyncio.get_running_loop().run_in_executor(self._worker, self._rest)
            self._training = False
        steps = stage_progress.total.steps
        tokens = train.tokens(steps, spec.work.micro_batches)
        return Result(
            steps=steps,
            tokens=tokens,
            loss=reports[0].loss if reports else stage_progress.total.loss if steps else None,
            error=error if steps or error else "no step was done",
            forward_bytes=sum(r.forward_bytes for r in reports),
            backward_bytes=sum(r.backward_bytes for r in reports),
            boundary_tokens=tokens if spec.is_chain else 0,
            text_seconds=sum(r.wait_text_s for r in reports),
        )

    def _rest(self) -> None:
        if self._trainer is not None:
            self._trainer.end_round()
        device.return_memory()

    def _pace(self, order: TrainOrder, spec: ReplicaSpec) -> Pace:
        work, joined = spec.work, 1
        if self._joins and not spec.is_chain:
            joined = self.joined(self.manifest, work.micro_batches, self._budget, len(self._hardware.devices))
        before = schedule.steps_before(self.manifest, order.plan.round, order.idle)
        return Pace(before, work.steps, work.micro_batches, order.total_steps, joined)

    async def _why_it_ended(
        self, failure: BaseException, stage: StageSpec, is_chain: bool, stage_progress: StageProgress
    ) -> str | None:
        """The error of a round that `failure` ended; None where its steps count: a full replica whose memory ran out
        gives up the last step alone. Raises a failure that is a bug."""
        if isinstance(failure, RankLost):  # with parameters and moments: the next round begins with others', or none
            self._trainer, self._shape = None, ()
            stage_progress.total = dataclasses.replace(stage_progress.total, steps=0)
        if not device.is_shortage(failure):
            if isinstance(failure, PotluckError):
                return str(failure)
            raise failure
        why = self._short_of_memory(stage, device.is_host_shortage(failure))
        if is_chain or self._trainer is None or not self._trainer.steps:
            return why
        await asyncio.get_running_loop().run_in_executor(self._worker, self._trainer.reset)
        stage_progress.total = dataclasses.replace(stage_progress.total, steps=self._trainer.steps)
        return None

    def _warn_of_pieces(self) -> None:
        """Warns once in a round that micro-batches are computed in pieces (peer/training/micro_batch.py)."""
        assert self._trainer is not None
        rows = self._trainer.piece_rows
        if rows and not self._warned:
            self._warned, self._joins = True, False
            text = (
                f"memory: it ran out in an inner step, which was done in pieces: until the round is over, {rows} of"
                f" {self._trainer.train.rows} sequences at a time and block by block, which is slower; close other"
                " programs, or offer less with --memory"
            )
            self._emit(events.Warning(text=text))

    def _short_of_memory(self, stage: StageSpec, host: bool) -> str:
        """Announces less memory than this stage needs, so that the next plan gives us a smaller role. Returns the
        warning.

        host: beside a GPU, the host's memory ran out.
        """
        room = self._budget
        own, beside = budget.needs_of(self.manifest, stage.first, stage.last, room.device)
        if host and room.is_split:
            left = min(int(SHORTAGE * (room.host_bytes or beside)), beside - 1)
            self._budget = dataclasses.replace(room, host_bytes=max(left, 1))
            remedy = "of the host's beside the GPU are offered from now on, close other programs"
        else:
            left = min(int(SHORTAGE * room.memory_bytes), own + (0 if room.is_split else beside) - 1)
            self._budget = dataclasses.replace(room, memory_bytes=left)
            remedy = "are offered from now on, offer no more than this machine has free with --memory"
        self._announce(memory_bytes=self._budget.memory_bytes, host_bytes=self._budget.host_bytes)
        text = f"memory: it ran out in blocks {stage.first} to {stage.last - 1}; {left / 1e6:.0f} MB {remedy}"
        self._emit(events.Warning(text=text))
        return text

    def _slow_stage(self, stages: tuple[StageSpec, ...], report: StepReport, micro_batches: int) -> str | None:
        """The peer of a stage that has become slow, at a chain's first stage."""
        if self._stage_seconds[0] != stages:
            self._stage_seconds = (stages, deque(maxlen=COMPARED_STEPS))
        if report.stage_seconds_per_microbatch:
            self._stage_seconds[1].append(report.stage_seconds_per_microbatch)
        slow = pipeline_model.slow_stage(list(self._stage_seconds[1]), micro_batches)
        return None if slow is None else stages[slow].peer

    async def _unless_reconfigured(
        self, work: Coroutine[None, None, None], generation: int, stop: asyncio.Event, chain_orders: ChainOrders
    ) -> TrainOrder | None:
        """Trains in one chain to the end, or returns the order to go on in another after a loss, here or elsewhere.
        Raises NeighbourLost if none comes before the round is over."""
        chain = asyncio.create_task(work)
        newer, over = asyncio.create_task(chain_orders.orders.get()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({chain, newer}, return_when=asyncio.FIRST_COMPLETED)
            if not newer.done():
                try:
                    chain.result()
                    return None
                except pipeline.NeighbourLost as error:
                    self._pipes.doubt(error.peer)
                    if not error.reported:
                        chain_orders.failed(generation, error.peer, error.reason)
                    await asyncio.wait({newer, over}, return_when=asyncio.FIRST_COMPLETED)
                    if not newer.done():
                        raise
            return newer.result()
        finally:
            await cancel(chain, newer, over)

    async def _chain(
        self,
        order: TrainOrder,
        position: int,
        stage_progress: StageProgress,
        stop: asyncio.Event,
        end: StopSign,
        on_step: Callable[[StepReport], None],
        chain_orders: ChainOrders,
    ) -> None:
        """The remaining inner steps, with the members of `order`. Raises PotluckError."""
        plan = order.plan
        spec = plan.replica(order.replica)
        stage, work = spec.stages[position], spec.work
        same, depth, took = self._last_step
        if same != spec.stages:
            depth, took = memory.under_way(self.manifest), None

        neighbours = self._pipes.neighbours(plan, order.replica, order.generation, position)
        if (found := await until(stop.wait(), neighbours)) is None:
            raise LocalError("the round was decided before its chain was complete")
        previous, following = found.result()
        assert self._trainer is not None
        first_step = self._trainer.pace.before + 1
        try:
            setup = pipeline.StageSetup(
                trainer=self._trainer,
                worker=self._worker,
                wires=(self.manifest.chains.forward, self.manifest.chains.backward),
                timeout=STUCK_SECONDS,
                read=reading.reader(self.manifest, self._text, work, first_step, self._emit),
                depth=depth,
                took=took,
                depths=budget.depths(self.manifest, stage.first, stage.last, self._budget),
                stop=end,
                on_step=on_step,
                trace=self._trace,
                statistics=self._statistics,
                on_lost=lambda lost: chain_orders.failed(order.generation, lost.peer, lost.reason),
                place=Place(self._screens, plan.round, position, len(spec.stages)),
            )
            await pipeline.run_steps(
                setup,
                first_step=first_step,
                steps=work.steps,
                previous=previous,
                following=following,
                progress=stage_progress,
                resume=order.generation > 0,
            )
        finally:
            if following is not None:  # the other one is closed where it came in
                self._close(following)

    def _close(self, stream: Stream) -> None:
        """Closes in the background, after the neighbour has read what is under way."""

        async def close() -> None:
            with contextlib.suppress(PotluckError):
                await stream.finish()
            await stream.close()

        task = asyncio.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _prepare(self, stage: StageSpec, pace: Pace, theta: Shards) -> None:
        """Makes a trainer for this stage, with the optimizer state that fits, and begins a round at θ(r-1)."""
        shards, loop = memory.stage_shards(self.manifest, stage.first, stage.last), asyncio.get_running_loop()
        if shards != self._shape:
            self._state = {**self._state, **self.optimizer()}
            former, self._trainer = self._trainer, None
            if former is not None:
                await loop.run_in_executor(self._worker, former.close)

            def tell(text: str) -> None:
                loop.call_soon_threadsafe(self._emit, events.Warning(text=text))

            def build() -> trainer.StageTrainer:
                made = self._make_trainer(shards, tell)
                made.load_optimizer(self._state)
                for shard in set(shards) & set(self._inherited):
                    made.add_moments(small_moments.unpack(made.spec, made.train, shard, self._inherited[shard]))
                return made

            self._trainer = await loop.run_in_executor(self._worker, build)
            self._shape = shards
            self._state, self._inherited = {}, {}
        assert self._trainer is not None
        await loop.run_in_executor(self._worker, self._trainer.begin_round, theta, pace)

    def _make_trainer(self, shards: tuple[str, ...], tell: Callable[[str], None]) -> trainer.StageTrainer:
        """On the worker. A trainer on all devices, where these shards are the whole model."""
        manifest, devices = self.manifest, self._hardware.devices
        model, train, is_whole = manifest.model, manifest.train, shards == layout.shard_names(manifest.model)
        if is_whole and (self._site is not None or budget.is_sharded(manifest, self._hardware.budget)):
            return ShardedTrainer(model, train, devices, self._threads, self._folder, site=self._site)
        if len(devices) > 1 and is_whole:
            return SeveralDevicesTrainer(model, train, devices, self._threads, self._folder, tell)
        if len(devices) > 1:
            tell(f"devices: a stage of a chain trains on one device, {devices[0]}; the others wait for a whole model")
        return self.trainer_class(model, train, shards, device=devices[0])
