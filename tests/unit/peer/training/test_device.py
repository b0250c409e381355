"""What the machine has, and sizes and rates as people write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peer.training import device
from protocol.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5G", 1_500_000_000),
        (" 2 gib ", 2**31),
        ("1000", 1000),
        ("3k", 3000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert device.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "8 apples", "-1GB", "0", "0.0001k", "8iB", "GB", "nan", "1e9"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(UsageError, match="not a size in bytes; write it like 8GB"):
        device.parse_size(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("20Mbps", 20_000_000), ("100M", 10**8), ("1.5Gbit/s", 1_500_000_000), ("3000bps", 3000), ("64kbps", 64_000)],
)
def test_rates(text: str, rate: int) -> None:
    assert device.parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "20MB/s", "20MBps", "20MB", "0", "-3M", "20MiBps"])
def test_what_is_not_a_rate(text: str) -> None:
    with pytest.raises(UsageError, match="not a rate in bits per second"):
        device.parse_rate(text)


def test_a_missing_device_is_an_error() -> None:
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    missing = [name for name, found in there.items() if not found]
    assert missing, "no machine has both"
    for name in missing:
        with pytest.raises(UsageError, match=f"device {name}: PyTorch finds none"):
            device.choose_devices((name,))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_memory_limits_of_version_2(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/outer/inner")
    base = tmp_path / "sys/fs/cgroup"
    for folder, limit, used in (("outer", "1000", "700"), ("outer/inner", "max", "600")):
        write(base / folder / "memory.max", limit)
        write(base / folder / "memory.current", used)
        write(base / folder / "memory.stat", "anon 5\ninactive_file 50")
    assert device.cgroup_available(tmp_path) == 350


def test_memory_limits_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu:/x\n3:memory:/box")
    write(tmp_path / "sys/fs/cgroup/memory/box/memory.limit_in_bytes", "1000")
    write(tmp_path / "sys/fs/cgroup/memory/box/memory.usage_in_bytes", "400")
    assert device.cgroup_available(tmp_path) == 600


def test_no_memory_limit(tmp_path: Path) -> None:
    assert device.cgroup_available(tmp_path) == 1 << 62


def test_memory_budget_respects_the_limit(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/box")
    write(tmp_path / "sys/fs/cgroup/box/memory.max", "1600")
    write(tmp_path / "sys/fs/cgroup/box/memory.current", "600")
    assert device.memory_budget("cpu", tmp_path) == 750


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert device.free_disk(tmp_path / "a" / "b") > 0


def test_a_shortage_is_told_from_other_errors() -> None:
    import torch

    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 55, dtype=torch.uint8)
    with pytest.raises(MemoryError) as none_left:
        bytearray(1 << 62)
    assert device.is_shortage(refused.value)
    assert device.is_shortage(ExceptionGroup("two tasks", [ValueError("other"), none_left.value]))
    assert not device.is_shortage(RuntimeError("shapes differ"))
    assert not device.is_shortage(ExceptionGroup("a task", [ValueError("other")]))


HEAPS = """
import sys, threading
from peer.training import device

if sys.argv[1] == "one":
    device.one_heap()
there, over = [threading.Event() for _ in range(4)], threading.Event()

def heaps():
    mapped = [line.split()[:2] for line in open("/proc/self/maps")]
    ends = {where: int(where.split("-")[1], 16) for where, access in mapped if access.startswith("---")}
    return {where for where, end in ends.items() if end % (64 << 20) == 0}

before = heaps()

def work(here):
    held = bytearray(100_000)
    here.set()
    over.wait()

for here in there:
    threading.Thread(target=work, args=(here,), daemon=True).start()
for here in there:
    here.wait()
print(len(heaps() - before))
"""
"""How many heaps threads have of their own: pieces of 64 MB, of which the system has not given all yet. By chance other
memory ends where one would, before any thread began."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's list of what is mapped")
def test_threads_take_memory_from_one_heap() -> None:
    """Where the C library is glibc; another one has none to begin with."""

    def heaps(how: str) -> int:
        made = subprocess.run(
            [sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True, timeout=120
        )
        return int(made.stdout)

    assert heaps("one") == 0
    assert heaps("many") in (0, 4)
