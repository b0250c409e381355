"""hivemind's DHT, with what a stranger can do to it bounded. Records are `subkey -> [key, value]`.

Deviations from plain hivemind 1.1.12:
- its msgpack decoder is replaced (`safe_loads`), because it can be made to recurse until the process crashes;
- what a DHT node keeps is bounded (`Storage`), because an answer with too many records never arrives;
- keys of a request, and requests of a peer, are limited (`_bounded`): a key costs as much time as a request may;
- a peer is one node: whom hivemind meets under a new name, it sends all records that such a node should have;
- a record's value repeats the key, so that a validator learns it (hivemind has only the key's hash).
"""

from __future__ import annotations

from peer.net import torchless  # noqa: F401 (before hivemind)

# isort: split

import asyncio
import contextlib
import contextvars
import functools
import hashlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any
from weakref import WeakKeyDictionary

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.utils.serializer import MSGPackSerializer

from peer.net.base import MAX_RECORD, MAX_TTL, ClockWrong, Timeout, Unreachable, Validate, check_record, log
from peer.net.daemon import Daemon
from peer.net.guests import Guests
from protocol.identity import short_peer
from protocol.wire.framing import FrameError, unpack_message

DHT_SECONDS = 20.0
RPC_SECONDS = 4.0
PINGS = 5
"""How often a node is pinged before we give up joining the DHT through it."""
RETRY_SECONDS = 0.5
SKEW_SECONDS = 60.0
"""How far beyond MAX_TTL a record's expiry may lie by our clock: the writer's may be ahead."""
MAX_KEY_BYTES = 3 << 20
"""Most bytes of records that we keep under one key. The daemon drops an answer of over 4 MiB without a word."""
MOST_RECORDS = 512
"""Under one key. Of more, preferred ones are kept, and a random part of the others: a stranger may make many names, but
cannot choose which stay."""
MOST_KEYS = 16
_SUBKEY_BYTES = 128
_RECORD_BYTES = _SUBKEY_BYTES + 16
"""Of a record in an answer, besides its value, at most."""
_PLAIN_VALUES = 64
"""Of what is no dictionary: a record's key and value, or a subkey."""
_DICTIONARY = 0x50
"""hivemind's extension type of a DHT dictionary."""


def safe_loads(raw: bytes) -> object:
    """Decodes what the DHT may carry: one plain value, or one dictionary of plain values. Never recurses.

    hivemind decodes extension types inside extension types by recursion, before any validator runs. Raises FrameError.
    """
    if raw[:1] not in (b"\xc7", b"\xc8", b"\xc9", b"\xd4", b"\xd5", b"\xd6", b"\xd7", b"\xd8"):
        return unpack_message(raw, values=_PLAIN_VALUES)
    try:
        outer = msgpack.unpackb(raw)  # without a hook an extension stays a pair (code, bytes)
    except (ValueError, msgpack.exceptions.UnpackException):
        raise FrameError("DHT dictionary: not valid msgpack") from None
    if not isinstance(outer, msgpack.ExtType) or outer.code != _DICTIONARY:
        raise FrameError("DHT dictionary: another extension type")
    match unpack_message(outer.data, values=4 * (2 * MOST_RECORDS) + _PLAIN_VALUES):
        case [_, _, list(items)]:
            pass
        case _:
            raise FrameError("DHT dictionary: not of the expected form")
    if len(items) > 2 * MOST_RECORDS:
        raise FrameError("DHT dictionary: too many records")
    dictionary = DictionaryDHTValue()  # the sender's size limit is not taken over
    with dictionary.freeze():
        for item in items:
            match item:
                case [str(subkey), bytes(value), float(expires)] if math.isfinite(expires):
                    dictionary.store(subkey, value, expires)
                case _:
                    raise FrameError("DHT dictionary: not of the expected form")
    return dictionary


MSGPackSerializer.loads = staticmethod(safe_loads)

Rpc = Callable[[DHTProtocol, Any, P2PContext], Awaitable[Any]]
_guests: WeakKeyDictionary[DHTProtocol, Guests] = WeakKeyDictionary()
"""The guests of the protocols whose requests are counted."""
_counted: contextvars.ContextVar[bool] = contextvars.ContextVar("counted", default=False)
"""Whether this is part of a counted request: hivemind takes each request for a ping, too, in a task of its own."""


def _bounded(rpc: Rpc) -> Rpc:
    """Wraps a handler of hivemind's, to refuse requests that are too large or too many."""

    @functools.wraps(rpc)
    async def bounded(self: DHTProtocol, request: Any, context: P2PContext) -> Any:
        if _counted.get():
            return await rpc(self, request, context)
        _counted.set(True)
        guests, now = _guests.get(self), asyncio.get_running_loop().time()
        peer = context.remote_id.to_base58()
        if guests is not None and not guests.may_call(peer, now, request.ByteSize()):
            raise PermissionError("too many requests")
        if guests is not None and not guests.may_be_node(peer, request.peer.node_id, now):
            raise PermissionError("another node id")
        if len(getattr(request, "keys", ())) > MOST_KEYS:
            if guests is not None:
                guests.offend(peer, "asks the DHT for too much at once", now)
            raise ValueError("too many keys")
        return await rpc(self, request, context)

    return bounded


for _name in ("rpc_ping", "rpc_store", "rpc_find"):
    setattr(DHTProtocol, _name, _bounded(getattr(DHTProtocol, _name)))


Latest = Callable[[bytes], float]
"""The value of a valid record -> until when, in Unix seconds, it may be kept."""


class Validator(RecordValidatorBase):  # type: ignore[misc]
    """Checks a record's size, expiry and form, and asks `validate`; refuses records without subkey.

    By `latest` a writer's newer record has the later expiry, and wins however often the older one is stored again.
    """

    def __init__(
        self, validate: Validate, now: Callable[[], float] = time.time, latest: Latest = lambda value: math.inf
    ) -> None:
        self._validate, self._now, self._latest = validate, now, latest

    def allows(self, key: str, subkey: str, value: bytes) -> bool:
        return self._validate(key, subkey, value)

    def validate(self, record: DHTRecord) -> bool:
        """Returns whether a record, as it travels, is to be kept and believed."""
        try:
            return self._check(record)
        except Exception:  # whatever a remote record provokes must not reach hivemind, which would tell the sender
            log.debug("a DHT record was refused", exc_info=True)
            return False

    def _check(self, record: DHTRecord) -> bool:
        subkey = unpack_message(record.subkey, limit=_SUBKEY_BYTES)
        pair = unpack_message(record.value, limit=MAX_RECORD + 512, depth=1)
        match subkey, pair:
            case str(), [str(key), bytes(value)]:
                return (
                    len(value) <= MAX_RECORD
                    and record.expiration_time <= self._now() + MAX_TTL + SKEW_SECONDS
                    and DHTID.from_bytes(record.key) == DHTID.generate(key)
                    and bool(self._validate(key, subkey, value))
                    and record.expiration_time <= self._latest(value)
                )
        return False


class Storage(DHTLocalStorage):  # type: ignore[misc]
    """Keeps MAX_KEY_BYTES of records for each key, so that our answers can arrive, and only newer ones than before.

    preferred: subkeys whose records are kept before all others
    """

    def __init__(self, preferred: set[str]) -> None:
        super().__init__()
        self._preferred = preferred
        self._salt = secrets.token_bytes(16)

    def _order(self, subkey: str) -> tuple[bool, bytes]:
        """The last ones are dropped first; a secret salt decides between strangers."""
        return subkey not in self._preferred, hashlib.sha256(self._salt + subkey.encode()).digest()

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        held = self.get(key)
        if held is not None:
            known = held.value.get(subkey)
            size = sum(_RECORD_BYTES + len(item.value) for item in held.value.data.values())
            if known is not None and known.expiration_time >= expiration_time:
                return False
            if known is None and len(held.value.data) >= MOST_RECORDS:
                last = max(held.value.data, key=self._order)
                if self._order(subkey) > self._order(last):
                    return False
                size -= _RECORD_BYTES + len(held.value.data[last].value)
                del held.value[last]
            if size + _RECORD_BYTES + len(value) - (len(known.value) if known else 0) > MAX_KEY_BYTES:
                return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


class Dht:
    """Our DHT node; `node` is hivemind's. Made by `begin`."""

    def __init__(self, node: DHTNode, validator: Validator, daemon: Daemon, preferred: set[str]) -> None:
        self.node = node
        self._validator = validator
        self._daemon = daemon
        self._preferred = preferred

    def count(self, guests: Guests) -> None:
        """Counts requests against the limits of `guests` from now on."""
        _guests[self.node.protocol] = guests

    def prefer(self, peers: Collection[str]) -> None:
        """See peer.net.base.Transport."""
        self._preferred.clear()
        self._preferred.update(peers)

    @classmethod
    async def begin(
        cls,
        daemon: Daemon,
        validate: Validate,
        rpc_seconds: float = RPC_SECONDS,
        latest: Latest = lambda value: math.inf,
    ) -> Dht:
        """Starts a node that knows no other yet."""
        validator, preferred = Validator(validate, latest=latest), set[str]()
        node = await DHTNode.create(
            p2p=daemon.p2p,
            record_validator=validator,
            wait_timeout=rpc_seconds,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            cache_refresh_before_expiry=0,
        )
        node.protocol.storage, node.protocol.cache = Storage(preferred), Storage(preferred)
        return cls(node, validator, daemon, preferred)

    async def join(self, peer: str, timeout: float) -> None:
        """Joins the DHT through a connected peer, if we are outside. Raises ClockWrong, Unreachable, TransportLost."""
        protocol, loop = self.node.protocol, asyncio.get_running_loop()
        if len(protocol.routing_table.uid_to_peer_id):
            return
        found, end = None, loop.time() + timeout
        for _ in range(PINGS):  # one that is busy answers a later ping
            try:
                ping = protocol.call_ping(PeerID.from_base58(peer), validate=True)
                found = await self._daemon.within(ping, end - loop.time())
            except ValidationError as error:
                if "local time" in str(error):
                    raise ClockWrong(
                        f"clock: it differs by more than 3 s from that of {short_peer(peer)};"
                        " set it right (NTP), try again"
                    ) from None
            except TimeoutError:
                pass
            if found is not None or end - loop.time() < RETRY_SECONDS:
                break
            await asyncio.sleep(RETRY_SECONDS)
        if found is None:
            raise Unreachable(
                peer, f"peer {short_peer(peer)}: answers, but not to the DHT; check that it is a Potluck peer"
            )
        await asyncio.sleep(0)  # lets hivemind enter it in the routing table
        with contextlib.suppress(TimeoutError):
            await self._daemon.within(self.node.find_nearest_nodes([self.node.node_id]), end - loop.time())

    async def store(self, key: str, subkey: str, value: bytes, ttl: float) -> bool:
        check_record(value, ttl)
        if not self._validator.allows(key, subkey, value):
            return False
        try:
            stored = self.node.store(key, [key, value], time.time() + ttl, subkey=subkey)
            return bool(await self._daemon.within(stored, DHT_SECONDS))
        except TimeoutError:
            return False

    async def get(self, key: str) -> dict[str, bytes]:
        try:
            found = await self._daemon.within(self.node.get(key, latest=True), DHT_SECONDS)
        except TimeoutError:
            raise Timeout("", f"DHT: no answer within {DHT_SECONDS:g} s; try again") from None
        if found is None or not isinstance(found.value, dict):
            return {}
        return {subkey: item.value[1] for subkey, item in found.value.items()}

    async def leave(self, timeout: float) -> None:
        await self._daemon.within(self.node.shutdown(), timeout)
