"""Arrays in files: what is written and read, arrays that live in a file, and what they cost."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from peer.net.disk import Disk
from peer.state import tensor_file
from peer.state.outer_optimizer import Outer
from protocol.codec.formats import Codec
from protocol.errors import UsageError
from protocol.run import init, layout
from protocol.run.layout import ModelSpec
from tests.support import displacement

DISK = Disk()
TENSORS = {
    "b/0": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a": np.float32([7.0]),
    "step": np.array(3.0, dtype=np.float32),
}


def _write(path: Path, metadata: dict[str, str] | None = None) -> bytes:
    DISK.write(path, *tensor_file.pieces(TENSORS, metadata))
    return path.read_bytes()


def test_a_file_comes_back_and_the_library_reads_it(tmp_path: Path) -> None:
    raw = _write(tmp_path / "t", {"round": "3"})
    tensors, metadata = tensor_file.read(DISK, tmp_path / "t")
    assert metadata == {"round": "3"}
    assert list(tensors) == sorted(TENSORS)
    for name, array in load(raw).items():
        np.testing.assert_array_equal(tensors[name], array)
        np.testing.assert_array_equal(TENSORS[name], array)
        assert tensors[name].shape == TENSORS[name].shape


def test_what_is_not_fp32_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor x: float64, not float32"):
        list(tensor_file.pieces({"x": np.zeros(1)}))


@given(data=st.data())
def test_a_damaged_file_is_refused_before_memory_is_taken(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "t"
    raw = _write(path)
    length = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:length])
    name = data.draw(st.sampled_from(sorted(header)))
    shapes = [("shape", value) for value in ([1 << 60], [-1, 4], "x", None)]
    field, value = data.draw(st.sampled_from([("dtype", "F16"), ("data_offsets", [0, 1]), *shapes]))
    header[name][field] = value
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[length:])
    taken: list[object] = []

    def empty(shapes: object) -> list[np.ndarray]:
        taken.append(shapes)
        return []

    with pytest.raises(tensor_file.Damaged):
        tensor_file.read(DISK, path, empty)
    assert not taken


@pytest.mark.parametrize(
    "raw", [b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b"\xff{}}" + bytes(9)]
)
def test_what_is_no_such_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(raw)
    with pytest.raises(tensor_file.Damaged):
        tensor_file.read(DISK, tmp_path / "t")


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    raw = save({"a": np.ones(9, dtype=np.float32)})
    for size in (len(raw) - 1, len(raw) - 36, 9):
        (tmp_path / "t").write_bytes(raw[:size])
        with pytest.raises(tensor_file.Damaged):
            tensor_file.read(DISK, tmp_path / "t")


# --- arrays that live in a file


def test_arrays_in_a_file_have_no_name_and_values_of_their_own(tmp_path: Path) -> None:
    shapes = [(3, 5), (), (2000,)]
    arrays, others = DISK.arrays(tmp_path, shapes), DISK.arrays(tmp_path, shapes)
    assert DISK.names(tmp_path) == []
    assert [a.shape for a in arrays] == shapes
    for number, array in enumerate((*arrays, *others)):
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.flags.writeable
        array[...] = number
    for number, array in enumerate((*arrays, *others)):
        assert (array == number).all()
    assert DISK.arrays(tmp_path, []) == []


_ANONYMOUS = """
import sys
from pathlib import Path
import numpy as np
from peer.net.disk import Disk

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

size = int(sys.argv[2])
at_first = anonymous()
(mapped,) = Disk().arrays(Path(sys.argv[1]), [(size // 4,)])
mapped.fill(1)
with_mapped = anonymous()
held = np.ones(size // 4, dtype=np.float32)
print(with_mapped - at_first, anonymous() - with_mapped)
assert held.sum() == mapped.sum()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_arrays_in_a_file_take_no_anonymous_memory(tmp_path: Path) -> None:
    """Anonymous memory has nowhere to go but swap; pages of a file are dropped when others need the room.

    Measured in a process of its own: in this one, what other tests freed would be used again, and nothing would grow.
    """
    size = 64 << 20
    command = [sys.executable, "-c", _ANONYMOUS, str(tmp_path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    in_a_file, held = map(int, done.stdout.split())
    assert in_a_file < size / 4
    assert held > size * 3 / 4, "that is how it would show"


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """Later it would be a signal that ends the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(UsageError) as caught:
            DISK.arrays(tmp_path, [(1 << 20,)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"directory {tmp_path}: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert DISK.names(tmp_path) == []


def test_rounds_have_the_same_bits_in_files(tmp_path: Path) -> None:
    spec = ModelSpec(vocab_size=96, d_model=32, n_layers=1, n_heads=2, d_ff=48, context=16)
    outers = [
        Outer(spec, Codec(64), 0.9, 0.8),
        Outer(spec, Codec(64), 0.9, 0.8, empty=lambda s: DISK.arrays(tmp_path, s)),
    ]
    scratch: list[list[np.ndarray]] = [[], []]
    rng, shards = np.random.default_rng(0), layout.shard_names(spec)
    for outer in outers:
        outer.theta = {s: init.initial_shard(spec, b"s", s, empty=outer.empty) for s in shards}
    for _ in range(3):
        for shard in shards:
            moved = [rng.standard_normal(shape).astype(np.float32) for shape in layout.shapes(spec, shard)]
            payloads = []
            for outer, arrays in zip(outers, scratch, strict=True):
                outer.accumulate(shard, displacement.of(moved))
                payloads.append(outer.encode(shard)[0])
                outer.apply(shard, [(0.5, payloads[0]), (0.25, payloads[0])], arrays)
            assert payloads[0] == payloads[1]
            assert outers[0].digest(shard) == outers[1].digest(shard)
            for a, b in zip(outers[0].feedback[shard], outers[1].feedback[shard], strict=True):
                np.testing.assert_array_equal(a, b)
