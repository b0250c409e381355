"""Measurements of contributions equal the plain ones to the bit: decode all, multiply whole columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codec import blob_hash, sparse, topk
from protocol.codec.formats import TILE
from protocol.codec.sparse import PayloadError, Sparse
from protocol.round import comparing
from protocol.round.comparing import UNIT, Broken, Examined, Floats, Measured, Update
from protocol.run import layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import Manifest, OuterSpec
from protocol.wire.commit import Part
from tests.support import tiny
from tests.support.plain_codec import norm_of

MODEL = ModelSpec(vocab_size=200, d_model=48, n_layers=1, n_heads=2, d_ff=80, context=8)
SHARDS = layout.shard_names(MODEL)


def plain_square(values: np.ndarray) -> float:
    """The sum of squares as the protocol states it, of one row."""
    sums = []
    for start in range(0, values.size, comparing.SUMMED_AT_ONCE):
        part = values[start : start + comparing.SUMMED_AT_ONCE].astype(np.float64) ** 2
        while part.size > 1:
            half = (part.size + 1) // 2
            part[: part.size - half] += part[half:]
            part = part[:half]
        sums.append(float(part[0]))
    return math.fsum(sums)


def plain(
    manifest: Manifest, seed: bytes, payloads: Sequence[dict[str, bytes]], panel: list[int], tiles: int
) -> Measured:
    """Decodes every shard of every update in full, and compares a tile of all of them at a time."""
    model, codec = manifest.model, manifest.outer.codec
    one_of = max(1, layout.total_parameters(model) // (tiles * TILE))
    squared: list[list[float]] = [[] for _ in payloads]
    alone: list[list[list[float]]] = [[] for _ in payloads]
    broken: dict[int, Broken] = {}
    cosines, elements = [], []
    for shard in SHARDS:
        shapes = layout.shapes(model, shard)
        cut = [topk.tiling(shape, 1) for shape in shapes]
        chosen = [comparing.chosen_tiles(seed, f"{shard}/{i}", t.tiles, one_of) for i, t in enumerate(cut)]
        rows: list[list[tuple[np.ndarray, np.ndarray]] | None] = []
        for i in panel:
            try:
                tensors: list[Sparse] | None = sparse.decode(codec, shapes, payloads[i][shard])
            except PayloadError as error:
                broken.setdefault(i, Broken(len(cosines), 0, f"{shard}: {error}"))
                tensors = None
            squared[i].append(0.0 if tensors is None else math.fsum(plain_square(x.values) for x in tensors))
            alone[i].append([] if tensors is None else [math.sqrt(squared[i][-1])])
            rows.append(
                None if tensors is None else [_tiles(x, t, at) for x, t, at in zip(tensors, cut, chosen, strict=True)]
            )
        cosines.append(_plain_cosines(rows, cut, chosen))
        elements.append(sum(at.size * t.n for at, t in zip(chosen, cut, strict=True)))
    norms = [math.sqrt(math.fsum(row)) for row in squared]
    shards = [[math.sqrt(square) for square in row] for row in squared]
    return Measured(norms, shards, alone, broken, [(tuple(panel), cosines)], [[{}] * len(SHARDS)], elements)


def _tiles(tensor: Sparse, tiling: topk.Tiling, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places within the chosen tiles and values, [tiles, k'] each."""
    keep = tensor.index.size // tiling.tiles
    at, values = tensor.index.reshape(-1, keep)[tiles], tensor.values.reshape(-1, keep)[tiles]
    row, col = np.divmod(at, tiling.cols)
    return row % tiling.tr * tiling.tc + col % tiling.tc, values


def _plain_cosines(
    rows: Sequence[list[tuple[np.ndarray, np.ndarray]] | None], cut: Sequence[topk.Tiling], chosen: Sequence[np.ndarray]
) -> Floats:
    total = np.zeros((len(rows), len(rows)))
    whole = []
    for row in rows:
        norm = 0.0 if row is None else math.sqrt(math.fsum(plain_square(v.reshape(-1)) for _, v in row))
        whole.append(
            [] if row is None else [np.rint(v.astype(np.float64) / norm * UNIT) if norm else 0.0 * v for _, v in row]
        )
    for number, (tiling, tiles) in enumerate(zip(cut, chosen, strict=True)):
        for tile in range(tiles.size):
            dense = np.zeros((len(rows), tiling.n))
            for i, row in enumerate(rows):
                if row is not None:
                    dense[i, row[number][0][tile]] = whole[i][number][tile]
            total += dense @ dense.T
    return total / UNIT**2


def drawn(manifest: Manifest, seed: int, alike: float) -> dict[str, bytes]:
    """An update that shares entries with all others, some of whose tensors are zero, and values equal."""
    own, common = np.random.default_rng([seed, 1]), np.random.default_rng(2)
    made = {}
    for shard in SHARDS:
        arrays = []
        for shape in layout.shapes(manifest.model, shard):
            array = alike * common.standard_normal(shape) + (1 - alike) * own.standard_normal(shape)
            arrays.append((array.round(1) * (own.random() > 0.1) * 10.0 ** own.integers(-20, 15)).astype(np.float32))
        made[shard] = sparse.encode(manifest.outer.codec, arrays)
    return made


def update(manifest: Manifest, payloads: dict[str, bytes], seen: dict[str, Examined] | None = None) -> Update:
    """As an archive gives it; `seen`: what was found earlier, by shard."""
    parts = [Part(shard=s, digest=tiny.digest(s), size=len(payloads[s]), norm=1.0) for s in SHARDS]
    known = (lambda part, find: find()) if seen is None else (lambda part, find: seen[part.shard])
    return comparing.update_of(manifest, parts, lambda part: payloads[part.shard], known)


def same(found: Measured, expected: Measured) -> None:
    assert found.norms == expected.norms
    assert found.shards == expected.shards
    assert found.payloads == expected.payloads
    assert found.broken == expected.broken
    assert found.elements == expected.elements
    for (panel, cosines), (other, others) in zip(found.panels, expected.panels, strict=True):
        assert panel == other
        for a, b in zip(cosines, others, strict=True):
            assert np.array_equal(a, b)


@given(
    keep=st.sampled_from([1, 16, 50, 700]),
    count=st.integers(1, 7),
    alike=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    tiles=st.sampled_from([1, 2, 4096]),
    torn=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_all_is_to_the_bit_what_the_plain_way_measures(
    keep: int, count: int, alike: float, tiles: int, torn: bool, seed: int
) -> None:
    manifest = tiny.manifest(model=MODEL, outer=OuterSpec(topk=keep))
    payloads = [drawn(manifest, seed + i, alike) for i in range(count)]
    if torn:
        payloads[0]["head"] = b"torn"
    panel = list(range(count))[::-1]
    expected = plain(manifest, b"seed %d" % seed, payloads, panel, tiles)

    def measured(updates: Sequence[Update]) -> Measured:
        return comparing.measure(MODEL, b"seed %d" % seed, updates, [panel], tiles)

    same(measured([update(manifest, x) for x in payloads]), expected)
    if not torn:
        codec, shapes = manifest.outer.codec, {s: layout.shapes(MODEL, s) for s in SHARDS}
        seen = [{s: comparing.examine(manifest, s, x[s]) for s in SHARDS} for x in payloads]
        same(measured([update(manifest, x, y) for x, y in zip(payloads, seen, strict=True)]), expected)
        same(measured([Update(lambda s, x=x: [sparse.decode(codec, shapes[s], x[s])]) for x in payloads]), expected)


@pytest.mark.parametrize("few", [1, 2, 4, 100])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_pairs_and_columns_give_the_same_products(few: int, rows: int) -> None:
    rng = np.random.default_rng(few)
    places = np.stack([np.sort(rng.choice(40, 12, replace=False)) for _ in range(rows)])
    values = rng.integers(-(2**24), 2**24, places.shape).astype(np.float64)
    dense = np.zeros((rows, 40))
    np.put_along_axis(dense, places, values, axis=1)
    expected = dense @ dense.T
    np.fill_diagonal(expected, 0.0)
    found = comparing.products(places, values, 40, few)
    np.fill_diagonal(found, 0.0)
    assert np.array_equal(found, expected)


def test_the_norm_that_is_found_is_that_of_what_is_decoded() -> None:
    manifest = tiny.manifest(model=MODEL, outer=OuterSpec(topk=16))
    payload = drawn(manifest, 0, 0.5)["head"]
    tensors = sparse.decode(manifest.outer.codec, layout.shapes(MODEL, "head"), payload)
    assert comparing.examine(manifest, "head", payload).norm == norm_of(tensors)


def test_a_size_that_is_not_the_payloads_is_found_also_where_it_is_known_what_is_in_it() -> None:
    manifest = tiny.manifest(model=MODEL, outer=OuterSpec(topk=16))
    payloads = drawn(manifest, 0, 0.5)
    parts = [Part(shard=s, digest=tiny.digest(s), size=len(payloads[s]), norm=1.0) for s in SHARDS]
    parts[0] = dataclasses.replace(parts[0], size=parts[0].size + 1)
    for seen in (None, {s: comparing.examine(manifest, s, x) for s, x in payloads.items()}):
        known = (lambda part, find: find()) if seen is None else (lambda part, find, seen=seen: seen[part.shard])
        made = comparing.update_of(manifest, parts, lambda part: payloads[part.shard], known)
        with pytest.raises(PayloadError, match=f"has {len(payloads[SHARDS[0]])} bytes, not {parts[0].size}"):
            made.decode(SHARDS[0])


NARROW = dataclasses.replace(MODEL, residual_width=16)
NARROW_SHARDS = layout.shard_names(NARROW)


def of_chain(manifest: Manifest, seed: int, stages: int) -> list[tuple[str, bytes]]:
    """(shard, payload) of all stages of a chain: as a full replica's, but the rows of tokens come from every stage."""
    common, found = np.random.default_rng(2), list[tuple[str, bytes]]()
    for shard in NARROW_SHARDS:
        for stage in range(stages if shard == "anchor" else 1):
            own = np.random.default_rng([seed, stage])
            arrays = []
            for shape in layout.shapes(NARROW, shard):
                array = 0.5 * common.standard_normal(shape) + own.standard_normal(shape) * (1 + stage)
                arrays.append(array.astype(np.float32))
            found.append((shard, sparse.encode(manifest.outer.codec, arrays)))
    return found


def summed(manifest: Manifest, payloads: Sequence[tuple[str, bytes]]) -> dict[str, np.ndarray]:
    """By shard, all its payloads decoded and added up, as one vector."""
    found = dict[str, np.ndarray]()
    for shard, payload in payloads:
        shapes = layout.shapes(NARROW, shard)
        dense = [np.zeros(math.prod(shape)) for shape in shapes]
        for into, tensor in zip(dense, sparse.decode(manifest.outer.codec, shapes, payload), strict=True):
            into[tensor.index] = tensor.values
        found[shard] = found.get(shard, 0.0) + np.concatenate(dense)
    return found


def updates_of(manifest: Manifest, payloads: Sequence[tuple[str, bytes]]) -> tuple[Update, list[Part]]:
    """As a node reads it, and its parts."""
    named = {blob_hash.name_of(payload): payload for _, payload in payloads}
    parts = [
        Part(shard=s, digest=blob_hash.name_of(x), size=len(x), norm=comparing.examine(manifest, s, x).norm)
        for s, x in payloads
    ]
    return comparing.update_of(manifest, parts, lambda part: named[part.digest]), parts


@pytest.mark.parametrize("keep", [16, 700, TILE])
def test_the_cosines_of_chains_are_those_of_their_summed_tensors(keep: int) -> None:
    """Two chains of two stages, one of five, and full replicas; but for the rounding of values to whole numbers, as for
    any update."""
    manifest = tiny.manifest(model=NARROW, outer=OuterSpec(topk=keep))
    sent = [of_chain(manifest, seed, stages) for seed, stages in enumerate((2, 1, 5, 2, 1))]
    found = comparing.measure(NARROW, b"seed", [updates_of(manifest, x)[0] for x in sent], [range(5)])
    ((_, cosines),) = found.panels
    sums = [summed(manifest, x) for x in sent]
    for number, shard in enumerate(NARROW_SHARDS):
        products = found_products(found, cosines, number)
        assert np.abs(scaled(products) - scaled_products(np.stack([x[shard] for x in sums]))).max() < 1e-7, shard


def found_products(found: Measured, cosines: Sequence[Floats], number: int) -> Floats:
    """Of a shard, as the judging takes them."""
    norms = np.array([row[number] for row in found.shards])
    return np.outer(norms, norms) * cosines[number]


def scaled(products: Floats) -> Floats:
    """Cosines."""
    return products / np.sqrt(np.outer(products.diagonal(), products.diagonal()))


def scaled_products(vectors: np.ndarray) -> Floats:
    return scaled(vectors @ vectors.T)


def test_what_the_stages_send_of_a_shard_is_added_up_exactly() -> None:
    """Payloads of 4^k values +-c each: as whole numbers they are not rounded."""
    manifest = tiny.manifest(model=NARROW, outer=OuterSpec(topk=TILE))
    (shape,) = layout.shapes(NARROW, "anchor")
    rng, codec = np.random.default_rng(0), manifest.outer.codec
    (order,) = sparse.decode(codec, [shape], sparse.encode(codec, [np.ones(shape, np.float32)]))

    def payload(k: int, size: float) -> list[Sparse]:
        values = np.zeros(order.index.size, np.float32)
        values[rng.choice(values.size, 4**k, replace=False)] = size * rng.choice((-1, 1), 4**k)
        return [Sparse(order.index, values)]

    sent = [
        [payload(k, 2.0 ** int(rng.integers(-9, 9))) for k in some] for some in ((5, 4, 6), (6,), (4, 4), (5,), (6, 3))
    ]
    others = {s: sparse.decode(codec, layout.shapes(NARROW, s), x) for s, x in of_chain(manifest, 0, 1)}
    updates = [Update(lambda s, x=x: x if s == "anchor" else [others[s]]) for x in sent]
    found = comparing.measure(NARROW, b"seed", updates, [range(len(sent))])
    ((_, cosines),) = found.panels
    number, dense = NARROW_SHARDS.index("anchor"), np.zeros((len(sent), math.prod(shape)))
    for into, payloads in zip(dense, sent, strict=True):
        for (tensor,) in payloads:
            into[tensor.index] += tensor.values
    products = found_products(found, cosines, number)
    assert np.abs(scaled(products) - scaled_products(dense)).max() < 1e-9
    np.testing.assert_allclose(products.diagonal(), (dense**2).sum(axis=1), rtol=1e-9)
    assert [row[number] ** 2 for row in found.shards] == pytest.approx(
        [sum(float((x.values.astype(float) ** 2).sum()) for (x,) in payloads) for payloads in sent], rel=1e-12
    )


def test_a_chain_whose_rows_of_tokens_cannot_all_be_read_is_broken_and_compared_without_them() -> None:
    manifest = tiny.manifest(model=NARROW, outer=OuterSpec(topk=64))
    payloads = of_chain(manifest, 0, 3)
    whole, parts = updates_of(manifest, payloads)
    torn = [(s, b"torn" if n == len(payloads) - 2 else x) for n, (s, x) in enumerate(payloads)]
    named = {part.digest: payload for part, (_, payload) in zip(parts, torn, strict=True)}
    bad = comparing.update_of(
        manifest, [dataclasses.replace(p, size=len(named[p.digest])) for p in parts], lambda part: named[part.digest]
    )
    found = comparing.measure(NARROW, b"seed", [whole, bad], [range(2)])
    assert list(found.broken) == [1]
    assert found.broken[1].reason.startswith("anchor: ")
    assert (found.broken[1].shard, found.broken[1].place) == (len(NARROW_SHARDS) - 1, 1)
    ((_, cosines),) = found.panels
    assert cosines[-1][1].tolist() == [0.0, 0.0]
    assert found.shards[1][-1] == 0.0


def test_the_norm_that_is_said_of_a_shard_is_that_of_all_its_payloads() -> None:
    manifest = tiny.manifest(model=NARROW, outer=OuterSpec(topk=64))
    made, parts = updates_of(manifest, of_chain(manifest, 0, 3))
    found = comparing.measure(NARROW, b"seed", [made], [range(1)])
    for number, shard in enumerate(NARROW_SHARDS):
        said = math.sqrt(sum(part.norm**2 for part in parts if part.shard == shard))
        assert comparing.is_true(said, found.shards[0][number])
        assert all(map(comparing.is_true, made.norms[shard], found.payloads[0][number]))
