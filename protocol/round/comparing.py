"""Norms of contributions and cosines between them, the same numbers on every machine. Pure.

The norms are of all that was sent. The cosines are of whole numbers in float64 whose sums stay below 2^53, so none is
rounded; the rest is `math.fsum`, or one rounded operation at a time in a stated order.

Of a large model about TILES tiles are compared. A decoded payload is kept in two bytes an entry (`Examined`), since the
tiles are chosen later.

*Notes.* A node decodes each payload when it arrives and notes what it found, so that a verdict needs no decoding. Notes
take NOTES_BYTES in all: two payloads of each peer and shard. What is not noted is decoded again by its reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.codec import philox, sparse, topk
from protocol.codec.formats import TILE
from protocol.codec.sparse import PayloadError, Sparse
from protocol.codec.topk import Tiled, Tiling
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Part

TILES = 4096
"""Tiles of a model that are compared, about."""
BLOCK = 1 << 16
DENSE_ABOVE = 4
"""Rows with an entry at one place, up to which these are multiplied pair by pair."""
OVERHEAD_BYTES = 512
"""Bytes that objects take beside their arrays, about."""
UNIT = 2.0**25
"""The norm of what is compared of a shard, in whole numbers."""
NORM_TOLERANCE = 1e-6
"""Relative, of a norm that is said: its sender may have added up the squares in another order."""
SUMMED_AT_ONCE = 1 << 18

Floats = npt.NDArray[np.float64]
Pieces = Mapping[tuple[int, int], Floats]
Places = npt.NDArray[np.int64]


class Unreadable(PayloadError):
    """A payload of an update cannot be read. place: its number among the payloads of its shard."""

    def __init__(self, text: str, place: int) -> None:
        super().__init__(text)
        self.place = place


@dataclass(frozen=True, slots=True)
class Update:
    """An update.

    decode: shard -> the payloads of its trainers, as tensors or what was found in them
    norms: the claimed L2 norm of each payload, by shard
    makers: the maker of each payload, by shard
    """

    decode: Callable[[str], Sequence[Sequence[Sparse] | Examined]]
    norms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    makers: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Examined:
    """Content of a shard's payload. square: of its norm; counts [T]: entries by tensor; the rest as in Tiled."""

    size: int
    square: float
    counts: tuple[int, ...]
    marked: npt.NDArray[np.uint16]
    values: npt.NDArray[np.float32]
    coded: bool

    @property
    def norm(self) -> float:
        return math.sqrt(self.square)

    @property
    def bytes(self) -> int:
        return self.marked.nbytes + self.values.nbytes + OVERHEAD_BYTES


def _examined(size: int, tensors: Sequence[Tiled]) -> Examined:
    return Examined(
        size=size,
        square=math.fsum(squares(x.sent) for x in tensors),
        counts=tuple(x.marked.size for x in tensors),
        marked=np.concatenate([x.marked for x in tensors]),
        values=np.concatenate([x.values for x in tensors]),
        coded=tensors[0].coded,
    )


def examine(manifest: Manifest, shard: str, payload: bytes) -> Examined:
    """Decodes a payload of `shard`. Raises PayloadError."""
    shapes = layout.shapes(manifest.model, shard)
    return _examined(len(payload), sparse.decode_tiles(manifest.outer.codec, shapes, payload))


def update_of(
    manifest: Manifest,
    parts: Sequence[Part],
    read: Callable[[Part], bytes],
    known: Callable[[Part, Callable[[], Examined]], Examined] = lambda part, find: find(),
    makers: Sequence[str] = (),
) -> Update:
    """The update in these parts: one of each shard, and of `anchor` one of each stage. known: a cache of contents;
    makers: of each part. `decode` raises Unreadable."""
    of: dict[str, list[Part]] = {}
    made: dict[str, list[str]] = {}
    for part in parts:
        of.setdefault(part.shard, []).append(part)
    for part, peer in zip(parts, makers, strict=False):
        made.setdefault(part.shard, []).append(peer)

    def content(part: Part) -> Examined:
        def find() -> Examined:
            payload = read(part)
            check(len(payload))
            return examine(manifest, part.shard, payload)

        def check(size: int) -> None:
            if size != part.size:
                raise PayloadError(f"payload: has {size} bytes, not {part.size} as is said; refused")

        found = known(part, find)
        check(found.size)
        return found

    def decode(shard: str) -> list[Examined]:
        found: list[Examined] = []
        for part in of[shard]:
            try:
                found.append(content(part))
            except PayloadError as error:
                raise Unreadable(str(error), len(found)) from None
        return found

    return Update(decode, {shard: [part.norm for part in theirs] for shard, theirs in of.items()}, made)


def squares(values: npt.NDArray[np.float32]) -> float:
    """The sum of the squares of finite `values` in pairwise order, the same on every machine."""
    return _squares(values[None])[0]


def _squares(values_PN: npt.NDArray[np.float32]) -> list[float]:
    """Returns the squared norm of each row, some rows at a time."""
    step = max(1, BLOCK // max(1, values_PN.shape[1]))
    if step < len(values_PN):
        return [square for i in range(0, len(values_PN), step) for square in _squares(values_PN[i : i + step])]
    sums = [[0.0] * len(values_PN)]
    for start in range(0, values_PN.shape[1], SUMMED_AT_ONCE):
        part = values_PN[:, start : start + SUMMED_AT_ONCE].astype(np.float64)
        np.multiply(part, part, out=part)
        while (size := part.shape[1]) > 1:
            half = (size + 1) // 2
            part[:, : size - half] += part[:, half:]
            part = part[:, :half]
        sums.append(part[:, 0].tolist())
    return [math.fsum(row) for row in zip(*sums, strict=True)]


def is_true(said: float, norm: float) -> bool:
    return math.isclose(said, norm, rel_tol=NORM_TOLERANCE)


class Broken(NamedTuple):
    """An unreadable payload of an update, by its shard's number, and the reason."""

    shard: int
    place: int
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of M updates of S shards.

    norms [M], shards [M][S]: L2 norms of the updates, and of their shards
    payloads [M][S]: of each payload of a shard
    broken: what cannot be read, by update
    panels: the members of each panel, and the cosines [P, P] between them by shard
    pieces: for each panel and shard, (update, place of a payload) -> its products [P] with the updates, relative to
        the norms of the whole shards; only where an update has several payloads of a shard
    elements [S]: how many are compared
    """

    norms: list[float]
    shards: list[list[float]]
    payloads: list[list[list[float]]]
    broken: dict[int, Broken]
    panels: list[tuple[tuple[int, ...], list[Floats]]]
    pieces: list[list[Pieces]]
    elements: list[int]


def measure(
    model: layout.ModelSpec,
    seed: bytes,
    updates: Sequence[Update],
    panels: Sequence[Sequence[int]],
    tiles: int = TILES,
) -> Measured:
    """Decodes every shard of every update once. panels: a partition of the updates; tiles: how many are compared."""
    squared: list[list[list[float]]] = [[] for _ in updates]
    broken: dict[int, Broken] = {}
    one_of = max(1, layout.total_parameters(model) // (tiles * TILE))
    cut = [_Cut(model, seed, shard, one_of) for shard in layout.shard_names(model)]
    cosines: list[list[Floats]] = [[] for _ in panels]
    pieces: list[list[Pieces]] = [[] for _ in panels]
    for panel, into, of_panel in zip(panels, cosines, pieces, strict=True):
        for number, shard in enumerate(cut):
            rows: list[list[Examined]] = []
            for i in panel:
                try:
                    rows.append([shard.examined(found) for found in updates[i].decode(shard.name)])
                except PayloadError as error:
                    place = error.place if isinstance(error, Unreadable) else 0
                    broken.setdefault(i, Broken(number, place, f"{shard.name}: {error}"))
                    rows.append([])
                squared[i].append([found.square for found in rows[-1]])
            total, parts = shard.cosines(rows)
            into.append(total)
            of_panel.append({(panel[at], place): row for (at, place), row in parts.items()})
    sums = [[math.fsum(row) for row in of_update] for of_update in squared]
    return Measured(
        norms=[math.sqrt(math.fsum(row)) for row in sums],
        shards=[[math.sqrt(square) for square in row] for row in sums],
        payloads=[[[math.sqrt(square) for square in row] for row in of_update] for of_update in squared],
        broken=broken,
        panels=[(tuple(panel), c) for panel, c in zip(panels, cosines, strict=True)],
        pieces=pieces,
        elements=[shard.elements for shard in cut],
    )


class _Cut:
    """A shard's tensors, and the tiles of each that are compared."""

    def __init__(self, model: layout.ModelSpec, seed: bytes, name: str, one_of: int) -> None:
        self.name = name
        self._tilings = [topk.tiling(shape, 1) for shape in layout.shapes(model, name)]
        self._chosen = [chosen_tiles(seed, f"{name}/{i}", t.tiles, one_of) for i, t in enumerate(self._tilings)]

    @property
    def elements(self) -> int:
        return sum(tiles.size * t.n for tiles, t in zip(self._chosen, self._tilings, strict=True))

    def examined(self, found: Sequence[Sparse] | Examined) -> Examined:
        """Returns the measurements of an update of the shard."""
        if isinstance(found, Examined):
            return found
        tensors = []
        for tensor, tiling in zip(found, self._tilings, strict=True):
            row, col = np.divmod(tensor.index, tiling.cols)
            inner = row % tiling.tr * tiling.tc + col % tiling.tc
            tensors.append(Tiled(inner.astype(np.uint16), tensor.values, False))
        return _examined(0, tensors)

    def cosines(self, rows: Sequence[Sequence[Examined]]) -> tuple[Floats, Pieces]:
        """[P, P] of updates, each the sum of its payloads; 0 of what is not there. All sums of products are of whole
        numbers below 2^53: the same in any order. And of each payload of those that have several.

            <Σ_s a_s, Σ_t b_t> = Σ_s Σ_t <a_s, b_t>        relative to sqrt(Σ_s |a_s|² Σ_t |b_t|²)
        """
        there = [(i, found) for i, row in enumerate(rows) for found in row]
        total, pieces = np.zeros((len(rows), len(rows))), dict[tuple[int, int], Floats]()
        if there:
            of, found = np.array([i for i, _ in there]), [x for _, x in there]
            products = _Chosen(self._tilings, self._chosen, found[0].counts).products(found) / UNIT**2
            if len(of) > len(set(of.tolist())):
                squares = [math.fsum(x.square for x in row) for row in rows]
                shares = np.sqrt([x.square / squares[i] if squares[i] else 0.0 for i, x in there])
                products = products * np.outer(shares, shares)
                places = [place for row in rows for place in range(len(row))]
                for i, place, row in zip(of.tolist(), places, products, strict=True):
                    if len(rows[i]) > 1:
                        pieces[i, place] = np.zeros(len(rows))
                        np.add.at(pieces[i, place], of, row)
            np.add.at(total, (of[:, None], of[None, :]), products)
        return total, pieces


class _Chosen:
    """The entries of a shard's chosen tiles, at the same positions in every update."""

    def __init__(self, tilings: Sequence[Tiling], chosen: Sequence[Places], counts: Sequence[int]) -> None:
        self.tensors: list[slice] = []
        """Which of the entries are those of each tensor."""
        self.blocks: list[tuple[slice, int, int]] = []
        """Which of them are those of some tiles, the first place of these, and how many places they have."""
        at, codes, corners = [], [], []
        entries = first = place = 0
        for number, (tiling, tiles, count) in enumerate(zip(tilings, chosen, counts, strict=True)):
            keep = count // tiling.tiles
            at.append((first + tiles[:, None] * keep + np.arange(keep)).ravel())
            codes.append(np.full(at[-1].size, 4 * number))
            corners.append((place + np.arange(tiles.size) * tiling.n).repeat(keep))
            self.tensors.append(slice(entries, entries + at[-1].size))
            for tile in range(0, tiles.size, max(1, BLOCK // tiling.n)):
                some = min(max(1, BLOCK // tiling.n), tiles.size - tile)
                self._add_block(entries + tile * keep, some * keep, place + tile * tiling.n, some * tiling.n)
            entries, first, place = entries + at[-1].size, first + count, place + tiles.size * tiling.n
        self._at, self._codes, self._corners = map(np.concatenate, (at, codes, corners))

    def _add_block(self, start: int, entries: int, place: int, places: int) -> None:
        if self.blocks and self.blocks[-1][2] + places <= BLOCK:
            before, first, size = self.blocks[-1]
            self.blocks[-1] = slice(before.start, start + entries), first, size + places
        else:
            self.blocks.append((slice(start, start + entries), place, places))

    def products(self, rows: Sequence[Examined]) -> Floats:
        """[P, P], of values that are whole numbers, such that the norm of each row is UNIT."""
        marked = np.stack([row.marked.take(self._at) for row in rows])
        sent = np.stack([self._sent(row, mark) for row, mark in zip(rows, marked, strict=True)])
        by_tensor = [_squares(sent[:, part]) for part in self.tensors]
        norms = np.array([math.sqrt(math.fsum(row)) for row in zip(*by_tensor, strict=True)])
        values = sent.astype(np.float64)
        # in two steps: the one number may be too large where the other is small
        values /= np.where(norms > 0, norms, 1.0)[:, None]
        values *= UNIT
        np.rint(values, out=values)
        marked &= np.uint16((1 << topk.MARK) - 1)
        total = np.zeros((len(rows), len(rows)))
        for part, first, places in self.blocks:
            place = self._corners[part] + marked[:, part].astype(np.int64) - first
            total += products(place, values[:, part], places)
        np.fill_diagonal(total, np.einsum("pe,pe->p", values, values))
        return total

    def _sent(self, row: Examined, marked: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
        return row.values.take(self._codes + (marked >> np.uint16(topk.MARK)) if row.coded else self._at)


def products(place_PE: Places, value_PE: Floats, places: int, few: int = DENSE_ABOVE) -> Floats:
    """[P, P]: sums of products of two rows at common places. Few rows at a place: by pairs, else by columns."""
    total = np.zeros((len(value_PE), len(value_PE)))
    width, place, value = value_PE.shape[1], place_PE.ravel(), value_PE.ravel()
    rows_at = np.bincount(place, minlength=places)
    kind = ((rows_at > 1).view(np.uint8) + (rows_at > few).view(np.uint8))[place]  # 0: one row alone, 1: few, 2: more
    at = np.flatnonzero(kind == 2)
    if at.size:
        columns = np.flatnonzero(rows_at > few)
        column = np.empty(places, dtype=np.int64)
        column[columns] = np.arange(columns.size)
        dense = np.zeros((len(total), columns.size))
        dense[at // width, column[place[at]]] = value[at]
        total += dense @ dense.T
    at = np.flatnonzero(kind == 1)
    ordered = place[at] << 32 | at
    ordered.sort()
    place, at = ordered >> 32, ordered & 0xFFFFFFFF
    who, value = at // width, value[at]
    for lag in range(1, few):
        pair = np.flatnonzero(place[lag:] == place[:-lag])
        if not pair.size:
            break
        of_pair = who[pair] * len(total) + who[pair + lag]
        half = np.bincount(of_pair, value[pair] * value[pair + lag], total.size).reshape(total.shape)
        total += half + half.T
    return total


def chosen_tiles(seed: bytes, name: str, tiles: int, one_of: int) -> Places:
    if one_of == 1:
        return np.arange(tiles)
    return np.sort(np.argsort(philox.bits(seed, name, tiles), kind="stable")[: -(-tiles // one_of)])


NOTES_BYTES = 256 << 20
"""Bytes; two rounds of 47 replicas with 178 M parameters."""
NOTES_PER_PEER = 2


class Notes:
    """`limit`: bytes. `lock`: is held whenever something changes, where several threads use it."""

    def __init__(self, limit: int = NOTES_BYTES, lock: AbstractContextManager[object] | None = None) -> None:
        self.used = 0
        """Bytes."""
        self._limit = limit
        self._found: dict[tuple[str, str], Examined] = {}  # by shard and digest
        self._sent: dict[tuple[str, str], list[str]] = {}  # sender and shard -> digests, the newest last
        self._committed: Set[str] = frozenset()
        self._lock = lock or nullcontext()

    def known(self, sender: str, part: Part, find: Callable[[], Examined]) -> Examined:
        """Returns the measurements of a part from the cache, or else from `find`. Raises as `find` does."""
        noted = self._found.get((part.shard, part.digest))
        if noted is not None:
            return noted
        found = find()
        self.keep(sender, part, found)
        return found

    def keep(self, sender: str, part: Part, found: Examined) -> None:
        """Notes what was found, if there is room."""
        key = part.shard, part.digest
        with self._lock:
            if key in self._found:
                return
            sent = self._sent.setdefault((sender, part.shard), [])
            if len(sent) == NOTES_PER_PEER:
                old = next((digest for digest in sent if digest not in self._committed), sent[0])
                sent.remove(old)
                self.used -= self._found.pop((part.shard, old)).bytes
            if self.used + found.bytes <= self._limit:
                self._found[key] = found
                self.used += found.bytes
                sent.append(part.digest)

    def settle(self, committed: Set[str]) -> None:
        """A round is decided: of what is noted only what it names is needed."""
        with self._lock:
            self._committed = committed
            self._found = {key: found for key, found in self._found.items() if key[1] in committed}
            self._sent = {
                who: left for who, sent in self._sent.items() if (left := [name for name in sent if name in committed])
            }
            self.used = sum(found.bytes for found in self._found.values())
