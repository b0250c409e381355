"""Every decoder of what strangers send, as functions of bytes, with inputs that they accept and the errors that they
may raise.

A target does what its caller in the package does with the bytes, checks what it accepted, and lets errors through. New
message types (protocol/wire/encoding.py) and value formats of payloads (protocol/codec/sparse.py) are picked up by
themselves.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import io
import math
import shutil
import struct
import tempfile
import types
import typing
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgpack
import numpy as np
import torch

from peer.chain import frames as chain_frames
from peer.chain import quantize
from peer.demo import recipe
from peer.net import address, compression, daemon, dht, directory, node_calls
from peer.net.base import Closed, Ended, Handler
from peer.net.blobs import BlobServer, BlobStore, Fetcher
from peer.training import moments
from protocol import identity
from protocol.codec import blob_hash, formats, sparse
from protocol.codec.formats import Codec
from protocol.codec.sparse import PayloadError
from protocol.errors import PotluckError, RemoteError, UsageError
from protocol.identity import Identity
from protocol.ledger import history, part_lists, rules, run_state
from protocol.round import handover
from protocol.run import layout
from protocol.run import manifest as manifests
from protocol.run.manifest import TrainSpec
from protocol.wire import calls, encoding, endpoints, framing, logfile, relaying
from protocol.wire.announcement import Announcement
from protocol.wire.calls import Handover, HandoverAnswer, Step
from protocol.wire.commit import DOMAIN, Commit, Part, Record, body_of
from protocol.wire.encoding import MessageError
from protocol.wire.framing import FrameError, FrameReader
from protocol.wire.noise import Handshake, NoiseError
from protocol.wire.plan import Plan
from protocol.wire.schema import Digest, SchemaError, build, packed, plain
from protocol.wire.session import LogRequest
from tests.e2e import swarms
from tests.fuzz.mutate import Mutator, change_bytes, change_msgpack, change_text
from tests.support import tiny

KEY = Identity(b"fuzz" * 8)
MANIFEST = tiny.manifest()
RUN = MANIFEST.run_id
ONE_NODE = dataclasses.replace(MANIFEST, operators=(KEY.peer_id,))
PARTS = tuple(Part(shard=s, digest="0" * 64, size=8, norm=1.0) for s in layout.shard_names(MANIFEST.model))


@dataclass(frozen=True)
class Target:
    """`share`: how many inputs it gets relative to others; `refuses`: what it may raise; `allowed`: processor seconds
    for the newest input, of so many bytes."""

    name: str
    run: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    seeds: Sequence[bytes]
    change: Mutator
    share: int
    allowed: Callable[[int], float] = lambda size: math.inf


def check(holds: bool, what: str) -> None:
    """Raises AssertionError, also where Python leaves assertions out."""
    if not holds:
        raise AssertionError(what)


# --- frames and messages


def unpack(raw: bytes) -> object:
    value = framing.unpack_message(raw)
    check(_depth(value) <= framing.MAX_DEPTH, "nested deeper than allowed")
    try:
        again = framing.pack_message(value)
    except FrameError as error:  # short floats become long ones
        check("at most" in str(error), f"what was read cannot be written: {error}")
        return type(value)
    check(repr(framing.unpack_message(again)) == repr(_in_order(value)), "what was read is not what is written")
    return type(value)


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _in_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_order(value[key]) for key in sorted(value)}
    return [_in_order(item) for item in value] if isinstance(value, list) else value


def frames(raw: bytes) -> object:
    """Two bytes say how the rest is cut."""
    reader, at, limit, total = FrameReader(), 2, 1 << 12, 0
    step = 1 + int.from_bytes(raw[:2], "big") % 300
    while True:
        frame = reader.next(limit)
        if frame is not None:
            total += framing.PREFIX + len(frame)
            check(len(frame) <= limit and total <= len(raw) - 2, "more came out than went in")
        elif at >= len(raw):
            return reader.pending > 0
        else:
            check(reader.pending <= limit + framing.PREFIX, "more is kept than one frame")
            reader.feed(raw[at : at + step])
            at += step


def decode(raw: bytes) -> object:
    message = encoding.decode(raw, KEY.peer_id)
    check(encoding.decode(encoding.encode(message), KEY.peer_id) == message, "is not what it says when it is sent on")
    return type(message)


def unseal(raw: bytes) -> object:
    """An envelope; or, behind a first byte of zero, what the sender signed with its own key: strangers can do that."""
    if raw[:1] == b"\0":
        raw = framing.pack_message({"p": KEY.peer_id, "b": raw[1:], "s": KEY.sign(DOMAIN + raw[1:])})
    signer, message = encoding.unseal(raw)
    check(signer == KEY.peer_id, "somebody else's name")
    return type(message)


def announcement(raw: bytes) -> object:
    if raw[:1] == b"\0":
        raw = framing.pack_message({"p": KEY.peer_id, "b": raw[1:], "s": KEY.sign(DOMAIN + raw[1:])})
    found = encoding.unseal_announcement(raw, KEY.peer_id, RUN)
    check(found is None or found.run == RUN, "another run's")
    return found is None


def from_node(raw: bytes) -> object:
    """A message of a node; or, behind a first byte of zero, a commit for which a member votes."""
    if raw[:1] == b"\0":
        raw = _voted(raw[1:])
    found = encoding.decode_any(raw, KEY.peer_id)
    if isinstance(found, Record):
        with _allowed(history.BadCommit):
            history.follow(ONE_NODE, None, raw)
        lists = dict.fromkeys([share.root for share in found.commit.shares], PARTS)
        for shard in layout.shard_names(MANIFEST.model):
            weights = [weight for weight, _, _ in found.commit.payloads(shard, lists)]
            check(all(0 < w <= 1 for w in weights), "a weight is not in (0, 1]")
        for plan in (None, example(Plan)):
            begun = run_state.begin(MANIFEST)
            state = dataclasses.replace(begun, standing=dataclasses.replace(begun.standing, plan=plan), latest=plan)
            for violation in rules.check(state, found.commit):
                check("\n" not in violation.reason, "a violation of several lines")
    return type(found)


def _voted(body: bytes) -> bytes:
    """A record with `body` as its commit and the vote of KEY, if it is a commit; else with a vote that is none."""
    signature = b""
    with _allowed(MessageError):
        commit = encoding.decode_record(b"\x83\xa1c" + body + b"\xa1n\x00\xa1v\x80", KEY.peer_id).commit
        signature = KEY.sign(body_of(commit, 0))
    return b"\x83\xa1c" + body + b"\xa1n\x00\xa1v" + framing.pack_message({KEY.peer_id: signature})


class _allowed:
    """Lets code go on after errors that it may raise."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, where: object) -> bool:
        return kind is not None and issubclass(kind, self._kinds)


def example(hint: Any, name: str = "") -> Any:
    """A value of a message's field."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return example(typing.get_args(hint)[0], name)
    if origin is Annotated:
        return "0" * 64 if hint == Digest else example(typing.get_args(hint)[0], name)
    if origin is tuple:
        many = {"coordinates": 3}
        return (example(typing.get_args(hint)[0], name),) * many.get(name, 2)
    if origin is dict:
        return {"embed": example(typing.get_args(hint)[1], name), "block.0": example(typing.get_args(hint)[1], name)}
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return hint(**{f.name: example(hints[f.name], f.name) for f in dataclasses.fields(hint)})  # type: ignore[operator]
    if hint is str:
        known = {"run": RUN, "parent": RUN, "peer": KEY.peer_id, "digest": "0" * 64, "shard": "embed"}
        known |= {"reachable": "private", "host": "203.0.113.5"}
        return known.get(name, "text")
    return {int: 7, float: 1.5, bool: True, bytes: b"bytes"}[hint]


EXAMPLES = [example(kind) for kind in encoding.TYPES.values()]
ENCODED = [encoding.encode(message) for message in EXAMPLES]
SEALED = [encoding.seal(KEY, message) for message in EXAMPLES]
COMMIT = framing.pack_message(packed(example(Commit)))
RECORDS = [_voted(COMMIT)]
ANNOUNCED = encoding.encode(example(Announcement))


def change_sealed(rng: Any, raw: bytes, others: Sequence[bytes]) -> bytes:
    """Changes the signed body behind the zero, or the envelope."""
    if raw[:1] == b"\0":
        return b"\0" + change_msgpack(rng, raw[1:], ENCODED)
    return change_msgpack(rng, raw, others)


# --- payloads

SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (((10, 50),), ((64, 128), (7,)), ((5,), (3, 4)))


CODECS = [*(Codec(k) for k in (1, 32, 4096)), Codec(32, "int4"), Codec(4096, "int8"), Codec(4096, "fp32")]


def payload(raw: bytes) -> object:
    """The first byte chooses codec and shapes."""
    chosen = (raw or b"\0")[0] % (len(CODECS) * len(SHAPES))
    codec, shapes = CODECS[chosen % len(CODECS)], SHAPES[chosen // len(CODECS)]
    for shape, got in zip(shapes, sparse.decode(codec, shapes, raw[1:]), strict=True):
        check(bool(np.isfinite(got.values).all()), "a value is not finite")
        check(len(np.unique(got.index)) == len(got.index) == len(got.values), "an entry comes twice")
        check(got.index.min() >= 0 and got.index.max() < math.prod(shape), "an entry is outside")
    return chosen


def _payloads() -> list[bytes]:
    rng = np.random.default_rng(0)
    seeds = []
    for chosen in range(len(CODECS) * len(SHAPES)):
        codec, shapes = CODECS[chosen % len(CODECS)], SHAPES[chosen // len(CODECS)]
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        seeds.append(bytes([chosen]) + sparse.encode(codec, arrays))
    return seeds


# --- chains

HEAD = chain_frames.Head(chain_frames.FORWARD, 0, 1, 1, 0, 2, 3, 64)
VALUES = (2, 3, 64)
CPU = torch.device("cpu")


class FakeStream:
    """A stream from which the given frames come, and then the end."""

    def __init__(self, frames: Sequence[bytes], name: str = "fuzz") -> None:
        self.remote = KEY.peer_id
        self.name = name
        self.sent = self.received = self.pending = 0
        self._frames = list(frames)

    async def send(self, *parts: bytes | memoryview, timeout: float = 1.0) -> None:
        self.sent += sum(memoryview(part).nbytes for part in parts)

    async def recv(self, limit: int = framing.MAX_FRAME, *, timeout: float | None = None) -> bytes:
        if not self._frames:
            raise Ended(self.remote, "stream: has ended")
        frame = self._frames.pop(0)
        if len(frame) > limit:
            raise Closed(self.remote, "stream: it sent a frame over the limit; try again")
        return frame

    async def finish(self) -> None:
        return

    async def close(self) -> None:
        return


def pipe(raw: bytes) -> object:
    """A stage reads a frame of its neighbour: header, then activations. The first byte chooses their format."""
    chosen = (raw or b"\0")[0] % len(formats.FORMATS)
    form = formats.FORMATS[chosen]
    head, body = chain_frames.parse("fuzz", memoryview(raw)[1:])
    chain_frames.compare("fuzz", head, body, HEAD._replace(code=chosen), quantize.size(VALUES, form))
    check(bool(torch.isfinite(quantize.decode(body, VALUES, form, CPU)).all()), "a value is not finite")
    return form


PIPE = [
    *(
        bytes([i]) + HEAD._replace(code=i).pack() + quantize.encode(torch.linspace(-1, 1, 384).reshape(VALUES), form)
        for i, form in enumerate(formats.FORMATS)
    ),
    b"\0" + chain_frames.Head(chain_frames.ABORT).pack() + KEY.peer_id.encode(),
]

# --- relayed streams


def relay_words(raw: bytes) -> object:
    """What a relay is asked, and what it answers."""
    if raw[:1] == b"\0":
        answer = relaying.answer_of(raw[1:])
        check(answer in relaying.ANSWERS, "an answer that is none")
        return answer
    return type(relaying.ask_of(raw[1:]))


def shaken(turns: int) -> tuple[Handshake, Handshake]:
    """Two sides of a handshake after `turns` messages."""
    both = [
        Handshake(initiator=i == 0, static=bytes([i + 1] * 32), fresh=bytes([i + 3] * 32), prologue=b"fuzz")
        for i in range(2)
    ]
    for turn in range(turns):
        writer, other = both[turn % 2], both[(turn + 1) % 2]
        other.read(writer.write(relaying.pack_hello(KEY, writer.own_static, "fuzz") if turn else b""))
    return both[0], both[1]


def handshake_message(raw: bytes) -> object:
    """The first byte says which of the three messages comes."""
    turn = (raw or b"\0")[0] % 3
    reader = shaken(turn)[(turn + 1) % 2]
    payload = reader.read(raw[1:])
    if turn:
        check(relaying.hello_of(payload, reader.their_static).peer == KEY.peer_id, "somebody else's name")
    return turn


def _handshake_messages() -> list[bytes]:
    made = []
    for turn in range(3):
        writer = shaken(turn)[turn % 2]
        made.append(bytes([turn]) + writer.write(relaying.pack_hello(KEY, writer.own_static, "fuzz") if turn else b""))
    return made


def relay_hello(raw: bytes) -> object:
    """A proof of presence; strangers can seal what they like."""
    found = relaying.hello_of(raw, STATIC)
    check(found.peer == KEY.peer_id and len(found.name) <= relaying.MAX_NAME, "not what was signed")
    return found


def sealed_record(raw: bytes) -> object:
    """What an opened record says."""
    kind, body = relaying.record_of(raw)
    check(len(body) <= relaying.RECORD, "more than a record")
    return kind


STATIC = bytes(range(32))
RELAY_WORDS = [
    b"\1" + relaying.pack_ask(KEY.peer_id),
    *(b"\0" + relaying.pack_answer(state) for state in relaying.ANSWERS),
]
SEALED_RECORDS = [
    bytes([relaying.DATA]) + b"data",
    bytes([relaying.CREDIT]) + relaying.credit(4096),
    *(bytes([kind]) for kind in (relaying.PING, relaying.PONG, relaying.CLOSE)),
]

# --- blobs

LOOP = asyncio.new_event_loop()
BLOB = bytes(range(256)) * 4
BLOB_NAME, PIECE = blob_hash.name_of(BLOB), len(BLOB) + 1


class _FakeTransport:
    """Opens streams that say `frames`; serves nothing."""

    peer_id = "us"

    def __init__(self, frames: Sequence[bytes] = ()) -> None:
        self._frames = frames
        self.handler: Handler | None = None

    async def open(self, peer: str, name: str, *, timeout: float) -> FakeStream:
        return FakeStream(self._frames)

    async def serve(self, name: str, handler: Handler) -> None:
        self.handler = handler

    def doubt(self, peer: str) -> None:
        return

    def seen_at(self, peer: str) -> str:
        return ""


@functools.cache
def _store(folder: str) -> BlobStore:
    """A store for this process, under the system's folder for temporary files."""
    path = Path(tempfile.mkdtemp(prefix="potluck-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return BlobStore(path / folder)


@functools.cache
def _handler() -> Handler:
    store, transport = _store("served"), _FakeTransport()
    store.put(BLOB)
    LOOP.run_until_complete(BlobServer(store, named={"manifest": b"m"}).serve(transport))  # type: ignore[arg-type]
    assert transport.handler is not None
    return transport.handler


def blob_request(raw: bytes) -> object:
    """What another peer asks of us: a request, then ranges."""
    first = raw[:1] + b"\0"
    stream = FakeStream([raw[1 : 1 + first[0]], raw[1 + first[0] :]], endpoints.BLOB)
    with contextlib.suppress(Ended):
        LOOP.run_until_complete(_handler()(stream))
    check(stream.sent <= len(BLOB) + 1000, "more is sent than there is")
    return stream.sent


def blob_reply(raw: bytes) -> object:
    """What another peer answers: frames of at most 700 bytes, the first as long as the first byte says."""
    first = raw[:1] + b"\0"
    frames = [raw[1 : 1 + first[0]], *(raw[i : i + PIECE] for i in range(1 + first[0], len(raw), PIECE))]
    store = _store("fetched")

    async def fetch() -> None:
        fetcher = Fetcher(_FakeTransport(frames), store)  # type: ignore[arg-type]
        try:
            await fetcher.fetch(BLOB_NAME, len(BLOB), [KEY.peer_id])
        finally:
            await fetcher.aclose()

    LOOP.run_until_complete(fetch())
    check(store.get(BLOB_NAME) == BLOB, "other bytes than were asked for")
    store.remove(BLOB_NAME)
    return "fetched"


_ASK = framing.pack_message({"blob": BLOB_NAME, "size": len(BLOB), "leaves": True, "insist": False})
_NAMED = framing.pack_message({"named": "manifest"})
BLOB_REQUESTS = [
    bytes([len(_ASK)]) + _ASK + framing.pack_message({"range": 0}),
    bytes([len(_NAMED)]) + _NAMED,
]
_HERE = framing.pack_message({"state": "here", "ask": []})
_BUSY = framing.pack_message({"state": "busy", "ask": [KEY.peer_id]})
BLOB_REPLIES = [bytes([len(_HERE)]) + _HERE + compression.pack(BLOB, compression.RAW), bytes([len(_BUSY)]) + _BUSY]


def change_blob_reply(rng: Any, raw: bytes, others: Sequence[bytes]) -> bytes:
    """Changes the first frame as a message, or the bytes."""
    if rng.random() < 0.5:
        return change_bytes(rng, raw, others)
    first = change_msgpack(rng, raw[1 : 1 + raw[0]] if raw else b"", BLOB_REQUESTS)[:255]
    return bytes([len(first)]) + first + compression.pack(BLOB, compression.RAW)


def packed_piece(raw: bytes) -> object:
    """What travels compressed; no more comes out than is expected."""
    found = compression.unpack(raw, 2 * len(BLOB))
    check(len(found) <= 2 * len(BLOB), "more comes out than is expected")
    return len(found)


# --- calls


def call_request(raw: bytes) -> object:
    """The request of a LOG call, as bootstrap/node.py reads it."""
    return encoding.expect(LogRequest, encoding.decode(raw, KEY.peer_id), KEY.peer_id).after


def log_reply(raw: bytes) -> object:
    """The reply of a LOG call, as `potluck log` and `potluck monitor` read it."""

    async def read() -> list[bytes]:
        return await node_calls.log_page(
            _FakeTransport([b"\0" + compression.pack(raw, compression.RAW)]), KEY.peer_id, -1
        )  # type: ignore[arg-type]

    return len(LOOP.run_until_complete(read()))


def small_call(raw: bytes) -> object:
    """What small calls and streams begin with or answer; the first byte says which."""
    cls = calls.CALLS[(raw or b"\0")[0] % len(calls.CALLS)]
    found = calls.read(cls, raw[1:], KEY.peer_id, "call")
    check(calls.read(cls, calls.write(found), KEY.peer_id, "call") == found, "is not what it says when it is sent on")
    return cls


CALLS = [bytes([i]) + calls.write(example(cls)) for i, cls in enumerate(calls.CALLS)]


def change_call(rng: Any, raw: bytes, others: Sequence[bytes]) -> bytes:
    """Changes what follows the byte that says what it is."""
    return raw[:1] + change_msgpack(rng, raw[1:], [other[1:] for other in others])


def hand_over(raw: bytes) -> object:
    """A giver's message as peer/state/handover.py reads it, and the decision before anything is fetched."""
    said = build(Handover, framing.unpack_message(raw), ignore_unknown=True)
    reason = handover.why_refused(MANIFEST, {}, example(Plan), said.heir, KEY.peer_id, said)
    check(reason is not None and reason.isprintable(), "somebody who trained nothing gives something")
    return reason


def hand_over_answer(raw: bytes) -> object:
    """What an heir says to a giver, as peer/state/handover.py reads it."""
    return Step(build(HandoverAnswer, framing.unpack_message(raw), ignore_unknown=True).step)


HANDOVERS = [
    framing.pack_message(plain(Handover(serial=1, heir=KEY.peer_id, shard=shard, topk=256, blob=BLOB_NAME, size=40)))
    for shard in ("block.0", "head")
]
HANDOVER_ANSWERS = [framing.pack_message(plain(HandoverAnswer(step=step, reason="why"))) for step in Step]


# --- moments

MOMENTS_SHARD = "block.0"
BY_MUON = dataclasses.replace(MANIFEST.train, optimizer="muon")


def adam(raw: bytes) -> object:
    """AdamW's moments that another peer sends."""
    train = MANIFEST.train
    found = moments.unpack(MANIFEST.model, train, MOMENTS_SHARD, raw)
    total = 0.0
    for name, shape in layout.tensors(MANIFEST.model, MOMENTS_SHARD):
        m, v = found[f"{name}/exp_avg"], found[f"{name}/exp_avg_sq"]
        check(m.shape == v.shape == tuple(shape), "another shape")
        check(bool(np.isfinite(m).all() and np.isfinite(v).all() and (v >= 0).all()), "a moment is no number in range")
        check(bool((np.abs(m) <= 10 * np.sqrt(v)).all()), "a first update would be larger than others are")
        total += float(v.sum(dtype=np.float64))
    check(total <= 1.01 * train.clip**2, "more than clipped gradients have")
    return len(found)


def muon(raw: bytes) -> object:
    """The moments that another peer of a run with Muon sends."""
    found = moments.unpack(MANIFEST.model, BY_MUON, MOMENTS_SHARD, raw)
    total = 0.0
    for name, shape in layout.tensors(MANIFEST.model, MOMENTS_SHARD):
        if BY_MUON.has_one_moment(MOMENTS_SHARD, shape):
            m = found[f"{name}/momentum_buffer"]
            check(
                m.shape == tuple(shape) and bool(np.isfinite(m).all()), "a momentum is no number, or of another shape"
            )
            total += float(np.square(m, dtype=np.float64).sum())
        else:
            check(found[f"{name}/exp_avg"].shape == found[f"{name}/exp_avg_sq"].shape == tuple(shape), "another shape")
    check(total <= 1.01 * BY_MUON.clip**2, "more than clipped gradients have")
    return len(found)


def _moments(train: TrainSpec) -> list[bytes]:
    rng, state = np.random.default_rng(0), {}
    for name, shape in layout.tensors(MANIFEST.model, MOMENTS_SHARD):
        state[f"{name}/momentum_buffer"] = 1e-4 * rng.standard_normal(shape).astype(np.float32)
        state[f"{name}/exp_avg"] = 1e-4 * rng.standard_normal(shape).astype(np.float32)
        state[f"{name}/exp_avg_sq"] = np.square(1e-4 * rng.standard_normal(shape).astype(np.float32))
        state[f"{name}/step"] = np.array(7, np.float32)
    packed_moments = moments.pack(MANIFEST.model, train, MOMENTS_SHARD, state)
    assert packed_moments is not None
    return [packed_moments]


# --- files and text


def _records(found: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack(">II", len(raw), zlib.crc32(raw)) + raw for raw in found)


def log_file(raw: bytes) -> object:
    total = 0
    for at, record in logfile.records(io.BytesIO(raw), Path("DIR/log")):
        check(at == total, "records do not follow each other")
        total = logfile.end_of(at, record)
        check(total <= len(raw), "more comes out than is there")
        with _allowed(history.BadCommit):
            history.follow(ONE_NODE, None, record)
    return total


def change_log(rng: Any, raw: bytes, others: Sequence[bytes]) -> bytes:
    """Bytes; or a record changed, whose length and CRC are right again."""
    if rng.random() < 0.6:
        return change_bytes(rng, raw, others)
    record = change_msgpack(rng, rng.choice(RECORDS), RECORDS)
    return rng.choice((raw, b"")) + _records([record])


def addresses(raw: bytes) -> object:
    text = raw.decode("utf-8", "surrogateescape")
    found = address.parse(text)
    check(text.startswith(found.dial) and text.endswith(found.peer), "another address than was given")
    check(text.isascii() and text.isprintable(), "an address that is not plain")
    identity.public_key(found.peer)
    daemon.dial_bytes(found)
    return found.dial.split("/")[1]


def manifest(raw: bytes) -> object:
    """The travelling form, and what a joining peer computes first of it."""
    return _use(manifests.from_bytes(raw, "from a stranger"))


def manifest_file(raw: bytes) -> object:
    return _use(manifests.from_toml(raw, "run.toml"))


def _use(found: manifests.Manifest) -> object:
    check(manifests.from_bytes(found.to_bytes(), "again").run_id == found.run_id, "another run when it is sent on")
    check(len(layout.shard_names(found.model)) < 1 << 20 and manifests.parameters(found) > 0, "sizes without bounds")
    return "read"


WEIGHTS = dataclasses.replace(MANIFEST, initial_state=("0" * 64,) * len(layout.shard_names(MANIFEST.model)))
MANIFESTS = [
    MANIFEST,
    WEIGHTS,
    recipe.make_manifest(swarms.options(Path("unused"), chains=1, residual_width=8), "0" * 64),
]

# --- the DHT


def dht_value(raw: bytes) -> object:
    """hivemind decodes values and subkeys with this before any validator runs."""
    return type(dht.safe_loads(raw))


def dht_record(raw: bytes) -> object:
    """[subkey, value] of a record, as a validator gets them; two lists of bytes."""
    outer = framing.unpack_message(raw)
    match outer:
        case [bytes(subkey), bytes(value), float(expires)]:
            record = dht.DHTRecord(DHT_KEY, subkey, value, expires)
            return VALIDATOR.validate(record)
    raise FrameError("not a record")


DHT_KEY = dht.DHTID.generate(endpoints.announcements_key(RUN)).to_bytes()
VALIDATOR = dht.Validator(directory.valid_record(RUN))


def _dictionary() -> bytes:
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils import MSGPackSerializer

    value = DictionaryDHTValue()
    with value.freeze():
        value.store("a", b"value", 4e9)
        value.store("b", b"other", 4.1e9)
    return bytes(MSGPackSerializer.dumps(value))


def change_dht(rng: Any, raw: bytes, others: Sequence[bytes]) -> bytes:
    """The tree inside the dictionary's extension type, or bytes."""
    if raw[:1] in (b"\xc7", b"\xc8", b"\xc9") and rng.random() < 0.7:
        head = {0xC7: 3, 0xC8: 4, 0xC9: 6}[raw[0]]
        inner = change_msgpack(rng, raw[head:], [])
        return bytes(msgpack.packb(msgpack.ExtType(0x50, inner)))
    return change_msgpack(rng, raw, others)


def change_record(rng: Any, raw: bytes, others: Sequence[bytes]) -> bytes:
    """Changes the record around, or the signed announcement in it."""
    if rng.random() < 0.5:
        return change_msgpack(rng, raw, others)
    return _record(DOMAIN, change_msgpack(rng, ANNOUNCED, ENCODED))


def _record(domain: bytes, body: bytes) -> bytes:
    sealed = framing.pack_message({"p": KEY.peer_id, "b": body, "s": KEY.sign(domain + body)})
    value = framing.pack_message([endpoints.announcements_key(RUN), sealed])
    return framing.pack_message([framing.pack_message(KEY.peer_id), value, 1.0])


TARGETS = [
    Target("unpack_message", unpack, (FrameError,), [*ENCODED, *SEALED], change_msgpack, 20),
    Target("frames", frames, (FrameError, framing.Ended),
        [b"\0\5" + framing.pack(b"a" * 30) + framing.pack(b"") + framing.END], change_bytes, 20),
    Target("encoding.decode", decode, (MessageError,), ENCODED, change_msgpack, 20),
    Target("sealed.unseal", unseal, (MessageError,), [*SEALED, *(b"\0" + x for x in ENCODED)], change_sealed, 3),
    Target("sealed.unseal_announcement", announcement, (), [b"\0" + ANNOUNCED, SEALED[0]], change_sealed, 3),
    Target("encoding.decode_any", from_node, (MessageError,), [*ENCODED, *RECORDS, b"\0" + COMMIT], change_sealed, 3),
    Target("part_lists.unpack", part_lists.unpack, (part_lists.BadList,), [part_lists.pack(PARTS)], change_msgpack, 3),
    Target("sparse.decode", payload, (PayloadError,), _payloads(), change_bytes, 12),
    Target("pipeline frames", pipe, (chain_frames.NeighbourLost, quantize.BadTensor), PIPE, change_bytes, 8),
    Target("relay words", relay_words, (FrameError,), RELAY_WORDS, change_msgpack, 4),
    Target("relayed handshakes", handshake_message, (NoiseError, FrameError), _handshake_messages(), change_bytes, 2),
    Target("relayed hellos", relay_hello, (FrameError,),
        [relaying.pack_hello(KEY, STATIC, "potluck/pipe/1")], change_msgpack, 3),
    Target("relayed records", sealed_record, (FrameError,), SEALED_RECORDS, change_bytes, 4),
    Target("blob requests", blob_request, (RemoteError,), BLOB_REQUESTS, change_msgpack, 2),
    Target("blob replies", blob_reply, (RemoteError,), BLOB_REPLIES, change_blob_reply, 2),
    Target("packed pieces", packed_piece, (compression.Malformed,),
        [compression.pack(BLOB * 2, form) for form in compression.FORMS], change_bytes, 4),
    Target("log requests", call_request, (MessageError,), [encoding.encode(LogRequest(after=3))], change_msgpack, 4),
    Target("log replies", log_reply, (RemoteError,),
        [framing.pack_message(RECORDS * 2), framing.pack_message([])], change_msgpack, 2),
    Target("small calls", small_call, (RemoteError,), CALLS, change_call, 4),
    Target("hand-overs", hand_over, (FrameError, SchemaError), HANDOVERS, change_msgpack, 3),
    Target("answers to hand-overs", hand_over_answer, (FrameError, SchemaError, ValueError),
        HANDOVER_ANSWERS, change_msgpack, 2),
    Target("moments", adam, (PayloadError,), _moments(MANIFEST.train), change_bytes, 4),
    Target("moments of muon", muon, (PayloadError,), _moments(BY_MUON), change_bytes, 4),
    Target("log file", log_file, (logfile.Damaged,), [_records(RECORDS * 3), b""], change_log, 6),
    Target("addresses", addresses, (address.BadAddress,), [
        f"/ip4/203.0.113.5/tcp/4001/p2p/{KEY.peer_id}".encode(),
        f"/ip6/2001:db8::1/tcp/1/p2p/{KEY.peer_id}".encode(),
        f"/dns4/node.example.org/tcp/65535/p2p/{KEY.peer_id}".encode(),
        f"/ip4/203.0.113.5/tcp/4001/p2p/{KEY.peer_id}/p2p-circuit/p2p/{tiny.OPERATOR.peer_id}".encode(),
    ], change_text, 12),
    Target("manifest from_bytes", manifest, (UsageError,), [m.to_bytes() for m in MANIFESTS], change_text, 4),
    Target("manifest from_toml", manifest_file, (UsageError,),
        [manifests.to_toml(m).encode() for m in MANIFESTS], change_text, 2),
    Target("DHT values", dht_value, (FrameError,),
        [_dictionary(), msgpack.packb(["key", b"value"]), b"\xc0"], change_dht, 10),
    Target("DHT records", dht_record, (FrameError,), [_record(DOMAIN, ANNOUNCED)], change_record, 3),
]  # fmt: skip
"""Errors that are not PotluckErrors, or several lines long, fail everywhere."""


def one_line(error: Exception) -> bool:
    """Whether an error can be shown: one printable line."""
    text = str(error)
    return not isinstance(error, PotluckError) or (text.isprintable() and len(text) < 2000)
