"""Replays a run from its log, and verifies the log.

    the model at round r  =  θ(0)  +  the commits 1..r  +  the sparse payloads that they name

Verification trusts no peer: it needs the log and the payloads, and compares its result with the attested digests. Where
the archive does not keep the first payloads any more it replays from the older of the states that are kept
(protocol/ledger/retention.py), whose digests are the log's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from peer.log.reader import BadPayload, Source
from peer.state import tensor_file
from peer.state.outer_optimizer import Outer
from peer.state.storage import Shards, read_theta
from protocol.codec import blob_hash
from protocol.codec.sparse import PayloadError
from protocol.codec.topk import Empty, in_memory
from protocol.errors import LocalError, RemoteError, UsageError, apart, shown
from protocol.identity import short_peer
from protocol.ledger import aggregation, history, part_lists, rules, run_state
from protocol.ledger.history import BadCommit
from protocol.ledger.part_lists import BadList, Lists, Parts
from protocol.ledger.retention import StateRounds
from protocol.ledger.run_state import RunState
from protocol.planning import memory
from protocol.round import comparing, judging
from protocol.round.comparing import Notes
from protocol.run import init, layout
from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.bounds import LEAST_COMPARED
from protocol.wire.commit import Commit, Contribution, Part, Share
from protocol.wire.encoding import MessageError
from protocol.wire.plan import Plan

CONCURRENT_FETCHES = 8


@dataclass(frozen=True, slots=True)
class State:
    """θ(round) of every shard, and the shards' digests."""

    round: int
    theta: Shards
    digests: dict[str, str]


def _initial(manifest: Manifest, empty: Empty = in_memory) -> Shards:
    """θ(0) from the seed; empty where the manifest names another."""
    names = () if manifest.initial_state else layout.shard_names(manifest.model)
    return {shard: init.initial_state(manifest, shard, empty=empty) for shard in names}


def replay(manifest: Manifest, commits: Sequence[Commit], payload: Callable[[str], bytes | None]) -> Iterator[State]:
    """Yields the state after each commit.

    commits: from round 0 on, without gaps.
    payload: payloads and lists of parts by name. Raises LocalError for a missing one.
    """
    outer = Outer.of(manifest)
    shards = layout.shard_names(manifest.model)

    def wanted(round: int, name: str) -> bytes:
        data = payload(name)
        if data is None:
            raise LocalError(f"payload {name[:12]} of round {round}: not in the archive; fetch it from a peer")
        return data

    outer.theta = _initial(manifest)
    for shard, digest in manifest.initial_digests.items():
        outer.theta[shard] = _read_shard(manifest, shard, digest, wanted(0, digest), in_memory)

    for commit in commits:
        read = functools.partial(wanted, commit.round)
        lists = aggregation.lists_of(commit, read)
        for shard in shards:
            _apply(outer, manifest, commit, shard, aggregation.contributions(commit, shard, lists, read))
        yield State(commit.round, dict(outer.theta), {shard: outer.digest(shard) for shard in shards})


# --- verification


Payload = Callable[[str, int], Awaitable[bytes]]
"""(digest, size) -> the blob with this digest. Raises BadPayload, RemoteError."""


@dataclass(frozen=True, slots=True)
class ArchiveExtent:
    """What an archive has, by its log."""

    begin: int
    """The round after which it keeps all payloads."""
    digests: Mapping[str, str]
    """Of the state after that round, by shard; none if that follows from the seed."""
    head: int
    """The newest round; -1 if there is none."""


async def extent(manifest: Manifest, source: Source) -> ArchiveExtent:
    """Reads a log once. Raises what `source` raises, except BadCommit."""
    states, head = StateRounds(manifest), -1
    with contextlib.suppress(BadCommit, MessageError):  # `verify` says what is wrong
        async for raw in source.records():
            commit = encoding.decode_record(raw, "the log").commit
            states.follow(commit)
            head = commit.round
    return ArchiveExtent(states.begin, states.digests[states.begin], head)


async def archived_state(
    manifest: Manifest, source: Source, known: ArchiveExtent, empty: Empty = in_memory
) -> State | None:
    """The state with which an archive begins; None if it follows from the seed, or cannot be had. Raises what `source`
    raises."""
    theta = Shards()
    try:
        for shard, digest in known.digests.items():
            raw = await source.payload(digest, manifest.state_bytes(shard))
            theta[shard] = await asyncio.to_thread(_read_shard, manifest, shard, digest, raw, empty)
    except (BadPayload, RemoteError):
        return None
    return State(known.begin, theta, {}) if theta else None


def _read_shard(manifest: Manifest, shard: str, digest: str, raw: bytes, empty: Empty) -> list[NDArray[np.float32]]:
    """The tensors of a shard with this digest. Raises BadPayload unless these are its bytes."""
    if len(raw) != manifest.state_bytes(shard) or blob_hash.name_of(raw) != digest:
        raise BadPayload("its bytes are not those of its digest")
    arrays = empty(manifest.state_shapes(shard))
    tensor_file.fill(io.BytesIO(raw), arrays)
    return arrays


@dataclass(frozen=True, slots=True)
class Problem:
    """A violation in a log."""

    round: int
    shard: str | None
    """None for the whole commit."""
    reason: str

    def __str__(self) -> str:
        return f"round {self.round}{f', {self.shard}' if self.shard else ''}: {self.reason}"


@dataclass(slots=True)
class Verification:
    """The result of `verify`."""

    head: Commit | None = None
    contributions: int = 0
    payloads: int = 0
    payload_bytes: int = 0
    attested: int = 0
    """Digests of shards in the commits."""
    agreed: int = 0
    """Digests that the replay confirms."""
    problems: list[Problem] = field(default_factory=list)
    theta: Shards = field(default_factory=dict)
    """The last state, of the shards that could be replayed to the end."""
    digests: dict[str, str] = field(default_factory=dict)


async def verify(
    manifest: Manifest,
    records: AsyncIterator[bytes],
    payload: Payload,
    report: Callable[[Problem], None],
    start: State | None = None,
    empty: Empty = in_memory,
    until: int | None = None,
    follow: Callable[[Commit], None] = lambda commit: None,
) -> Verification:
    """Checks a log commit by commit and replays it shard by shard.

    report, follow: receive each problem at once, and each valid commit before its payloads are fetched.
    start: state to replay from (default: θ(0) from the seed).
    until: the round whose state is wanted; the log is read as far as to its attestation.

    Stops at the first invalid commit. A shard is replayed until a payload or a list of parts is missing or wrong, or
    its state is not the attested one. Raises what `records` raises, except BadCommit.
    """
    done = Verification()
    outer = Outer.of(manifest, empty=empty)
    outer.theta = dict(start.theta) if start else await asyncio.to_thread(_initial, manifest, empty)
    replayed = start.round if start else -1
    kept, state, made = _Kept(payload), run_state.begin(manifest), dict[str, str]()

    def problem(round: int, shard: str | None, *reasons: str) -> None:
        for reason in reasons:
            done.problems.append(Problem(round, shard, reason))
            report(done.problems[-1])

    if not outer.theta:
        problem(0, None, "the state to replay from is not in the archive, or is damaged")
    while True:
        try:
            raw = await anext(records, None)
            if raw is None:
                break
            commit = history.follow(manifest, done.head, raw).commit
        except BadCommit as error:
            problem(0 if done.head is None else done.head.round + 1, None, f"the commit {error}")
            break
        problem(commit.round, None, *(violation.reason for violation in rules.check(state, commit)))
        before, state = state, state.apply(commit)
        done.contributions += len(commit.contributions)
        done.head = commit
        follow(commit)
        if commit.round <= replayed:
            continue
        for shard, reason in _false_aggregates(commit, made):
            problem(commit.round - 1, shard, reason)
        made = {}
        is_past = until is not None and commit.round > until
        kept.begin()
        lists, reasons, unknown = await _lists(manifest, before.plan, None if is_past else commit, kept.payload)
        problem(commit.round, None, *reasons)
        for shard in unknown & outer.theta.keys():
            del outer.theta[shard]
        for shard in list(outer.theta):
            if reason := await asyncio.to_thread(_compare, outer, commit, shard, done):
                problem(commit.round - 1, shard, reason)
                del outer.theta[shard]
                continue
            if is_past:
                continue
            wrong, items = await _payloads(manifest, commit, shard, lists, kept)
            problem(commit.round, shard, *wrong)
            if items is None:
                del outer.theta[shard]
                continue
            made |= await asyncio.to_thread(_apply, outer, manifest, commit, shard, items)
            done.payloads += len(items)
            done.payload_bytes += sum(len(data) for _, data in items)
        if is_past:
            break
        if (unjust := await _unjust(before, commit, kept)) is not None:
            problem(commit.round, None, unjust)
    done.theta = dict(outer.theta)
    done.digests = {shard: await asyncio.to_thread(outer.digest, shard) for shard in outer.theta}
    return done


def _apply(
    outer: Outer, manifest: Manifest, commit: Commit, shard: str, items: list[tuple[float, bytes]]
) -> dict[str, str]:
    """Applies a commit to a shard. Returns the name of the aggregate by the shard, if there is one."""
    codec, found = aggregation.applied(manifest, commit, shard, items)
    outer.apply(shard, found, codec=codec)
    return {shard: blob_hash.name_of(found[0][1])} if aggregation.is_aggregated(manifest, commit) else {}


def _compare(outer: Outer, commit: Commit, shard: str, done: Verification) -> str:
    """Compares a shard's state before a commit with the digest that its peers attest, if they do; `done` counts it.
    Returns what is wrong, or nothing."""
    if shard not in commit.digests:
        return ""
    done.attested += 1
    if (found := outer.digest(shard)) == commit.digests[shard]:
        done.agreed += 1
        return ""
    gives, attested = apart(found, commit.digests[shard])
    return f"the replay gives state {gives}, the peers say {attested}"


def _false_aggregates(commit: Commit, made: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields shards of which a commit names another aggregate than `made`, by shard, and what is wrong."""
    for each in commit.aggregates:
        if made.get(each.shard, each.digest) != each.digest:
            gives, named = apart(made[each.shard], each.digest)
            yield each.shard, f"its updates give aggregate {gives}, the log names {named}"


class _Kept:
    """The lists and payloads of this round and the previous one, by name."""

    def __init__(self, payload: Payload) -> None:
        self.notes = Notes()
        """Summaries of the payloads."""
        self._payload = payload
        self._before: dict[str, bytes] = {}
        self._now: dict[str, bytes] = {}

    def begin(self) -> None:
        """Begins the next round."""
        self.notes.settle(self._now.keys())
        self._before, self._now = self._now, {}

    async def payload(self, name: str, size: int) -> bytes:
        """As `Payload`."""
        found = self._now.get(name) or self._before.get(name) or await self._payload(name, size)
        self._now[name] = found
        return found

    async def fetch(self, manifest: Manifest, contributions: Sequence[Contribution]) -> None:
        """Fetches everything that these name. Raises BadPayload, BadList, RemoteError."""
        for share in (share for c in contributions for share in c.shares):
            if part_lists.may_be_fetched(manifest, share):
                for part in part_lists.unpack(await self.payload(share.root, share.listed)):
                    await self.payload(part.digest, part.size)

    def read(self, name: str) -> bytes:
        """Raises BadPayload."""
        if name not in self._now or blob_hash.name_of(self._now[name]) != name:
            raise BadPayload("it is not here")
        return self._now[name]


async def _unjust(before: RunState, commit: Commit, kept: _Kept) -> str | None:
    """Why a commit's verdict differs from the rule's; None if it does not, or if a payload is missing or wrong.

    before: the state before the commit.
    """
    manifest, trial = before.manifest, before.standing.tried(commit)
    judged = len(commit.contributions) + sum(x.judged is not None for x in commit.left_out)
    last = before.last if judged >= LEAST_COMPARED else ()
    if not commit.contributions:
        return None
    try:
        await kept.fetch(manifest, [*commit.contributions, *last])

        def why() -> str | None:
            updates = {c.replica: judging.held(manifest, c, kept.read, kept.notes.known) for c in commit.contributions}
            earlier = tuple(judging.held(manifest, c, kept.read, kept.notes.known) for c in last)
            return judging.why_unjust(manifest, commit, updates, judging.PreviousRound(before.medians, earlier), trial)

        return await asyncio.to_thread(why)
    except (BadPayload, BadList, PayloadError, RemoteError, KeyError):
        return None


async def _lists(
    manifest: Manifest, plan: Plan | None, commit: Commit | None, payload: Payload
) -> tuple[dict[str, Parts], list[str], set[str]]:
    """The lists of parts by root, their problems, and the shards with unknown parts; empty without a commit.

    plan: of the round.
    """
    lists: dict[str, Parts] = {}
    wrong: list[str] = []
    unknown: set[str] = set()
    for contribution in commit.contributions if commit is not None else ():
        spec = plan.find(contribution.replica) if plan is not None else None
        fits = spec is not None and len(spec.stages) == len(contribution.shares)
        for index, share in enumerate(contribution.shares):
            shards = layout.shard_names(manifest.model)
            if spec is not None and fits:
                shards = memory.stage_shards(manifest, spec.stages[index].first, spec.stages[index].last)
            reasons, parts = await _list_of(manifest, share, shards, payload)
            wrong += reasons
            unknown.update(shards if parts is None else ())
            lists[share.root] = parts or ()
    return lists, wrong, unknown


async def _list_of(
    manifest: Manifest, share: Share, shards: tuple[str, ...], payload: Payload
) -> tuple[list[str], Parts | None]:
    """The problems of a share's list of parts, and the parts; None if unknown. shards: the planned ones."""
    name = f"list of parts {share.root[:12]} of {short_peer(share.peer)}"
    if not part_lists.may_be_fetched(manifest, share):
        return [f"{name}: {share.listed} bytes are more than a list can have"], None
    try:
        raw = await payload(share.root, share.listed)
        if blob_hash.name_of(raw) != share.root:
            raise BadPayload("its bytes are not those that were committed")
        parts = part_lists.unpack(raw)
    except (BadPayload, BadList, RemoteError) as error:
        return [f"{name}: {error}"], None
    reason = part_lists.why_not_of(share, parts) or part_lists.why_not_parts(manifest, shards, parts)
    return [f"{name}: {reason}"] if reason else [], parts


async def _payloads(
    manifest: Manifest, commit: Commit, shard: str, lists: Lists, kept: _Kept
) -> tuple[list[str], list[tuple[float, bytes]] | None]:
    """The problems of a shard's payloads of a round, and (weight, payload) of all; None if they cannot be applied."""
    gate = asyncio.Semaphore(CONCURRENT_FETCHES)

    async def one(weight: float, part: Part, sender: str) -> tuple[float, bytes, str | None]:
        try:
            async with gate:
                data = await kept.payload(part.digest, part.size)
                if len(data) != part.size or blob_hash.name_of(data) != part.digest:
                    raise BadPayload("its bytes are not those that were committed")
                examined = await asyncio.to_thread(comparing.examine, manifest, shard, data)
                kept.notes.keep(sender, part, examined)
        except (BadPayload, PayloadError, RemoteError) as error:
            raise BadPayload(f"payload {part.digest[:12]} of {short_peer(sender)}: {error}") from None
        if comparing.is_true(part.norm, norm := examined.norm):
            return weight, data, None
        name = f"payload {part.digest[:12]} of {short_peer(sender)}"
        return weight, data, f"{name}: its norm is {norm:.6g}, the commit says {part.norm:.6g}"

    found = await asyncio.gather(*(one(*item) for item in commit.payloads(shard, lists)), return_exceptions=True)
    wrong: list[str] = []
    items: list[tuple[float, bytes]] = []
    for result in found:
        if isinstance(result, BadPayload):
            wrong.append(str(result))
        elif isinstance(result, BaseException):
            raise result
        else:
            items.append(result[:2])
            wrong += [result[2]] if result[2] else []
    return wrong, items if len(items) == len(found) else None


def start_from(manifest: Manifest, folder: Path, empty: Empty = in_memory) -> State:
    """Reads a peer's checkpoint. Raises UsageError unless it is one of the run's model."""
    round, theta = read_theta(folder, empty)
    names = layout.shard_names(manifest.model)
    for shard, arrays in theta.items():
        fits = shard in names and tuple(a.shape for a in arrays) == manifest.state_shapes(shard)
        if not fits or any(a.dtype != np.float32 for a in arrays):
            raise UsageError(f"checkpoint {folder}: {shown(shard)} is not of the run's model; give one of this run")
    return State(round, theta, {})
