"""What this machine has: a device, memory, disk. All amounts in bytes, rates in bits per second.

Units follow SI: K, M, G, T are powers of 1000; KiB, MiB, GiB, TiB are powers of 1024. torch is imported only when a
device is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import re
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from protocol.errors import UsageError
from protocol.planning import budget
from protocol.planning.budget import Budget
from protocol.planning.memory import MOST_DEVICES
from protocol.run.manifest import Manifest

DEVICES = ("auto", "cuda", "mps", "cpu")
CPU_SHARE, GPU_SHARE = 0.75, 0.9
"""Of the available memory that Potluck may use on a CPU or an integrated GPU, and on a GPU, where the rest is for the
allocator's fragments and the kernels' workspaces."""
_HEAP = {-8: 1, -3: 32 << 20, -1: 1 << 30}
"""For mallopt, by the numbers of glibc's malloc.h: M_ARENA_MAX, M_MMAP_THRESHOLD (larger tensors have pages of their
own, as glibc would itself do once such were freed), M_TRIM_THRESHOLD."""
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:b|bps|bit|bit/s|bits/s)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in a size such as `8GB`, `512MiB`, `1.5G` or `1000000`. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match and not (match[3] and not match[2]):
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()])
    if size < 1:
        raise UsageError(f'size "{text}": not a size in bytes; write it like 8GB or 512MiB')
    return size


def parse_rate(text: str) -> int:
    """Bits per second in a rate such as `20Mbps`, `100M` or `1.5Gbit/s`. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    in_bytes = re.search(r"B(/s|ps)?$", text.strip())
    rate = int(float(match[1]) * 1000 ** _POWERS[match[2].lower()]) if match and not in_bytes else 0
    if rate < 1:
        raise UsageError(f'rate "{text}": not a rate in bits per second; write it like 20Mbps (one byte is 8 bits)')
    return rate


def parse_devices(device: str, devices: str | None) -> tuple[str, ...]:
    """The devices of --device and --devices, whether they are here or not: `auto`, `mps`, `cuda:0` `cuda:1`. `cpu,cpu`
    trains in two processes, for tests. Raises UsageError."""
    if devices is None and not device.startswith("cuda:"):
        if device not in DEVICES:
            raise UsageError(f'device "{device}": not known; choose one of {", ".join(DEVICES)}')
        return (device,)
    if devices is not None and device != "auto":
        raise UsageError("devices: --devices takes the place of --device; give one of them")
    text = device.removeprefix("cuda:") if devices is None else devices
    words = [word.strip() for word in text[: 8 * MOST_DEVICES].split(",")]
    found = tuple(f"cuda:{int(word)}" if word.isdecimal() else word for word in words)
    if len(found) > MOST_DEVICES or (set(found) != {"cpu"} and not all(word.isdecimal() for word in words)):
        raise UsageError(f'devices "{text[:80]}": not numbers of GPUs; write them like 0,1,2,3')
    return found


def try_torch() -> str:
    """Imports torch and computes a gradient with it. Returns its version. Raises what torch raises."""
    import torch

    x = torch.ones(64, 64, requires_grad=True)
    (x @ x).sum().backward()
    return str(torch.__version__)


def choose_devices(wanted: Sequence[str]) -> tuple[str, ...]:
    """The devices of `parse_devices` on this machine; `auto` is the first kind that works. Raises UsageError."""
    if set(wanted) == {"cpu"}:
        return tuple(wanted)
    import torch

    if wanted[0] in DEVICES:
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        if wanted[0] == "auto":
            return (next(name for name in DEVICES[1:] if there[name]),)
        if not there[wanted[0]]:
            raise UsageError(f"device {wanted[0]}: PyTorch finds none on this machine; use --device auto or cpu")
        return tuple(wanted)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    numbers = [name.removeprefix("cuda:") for name in wanted]
    if len(set(wanted)) < len(wanted) or any(int(number) >= count for number in numbers):
        text = ",".join(numbers)[:80]
        raise UsageError(f'devices "{text}": PyTorch finds {count} GPUs here; name each of them once, from 0')
    return tuple(wanted)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that a peer trains with and offers.

    devices: of one kind; the first one trains stages of chains.
    memory_bytes: for Potluck above an idle process, of the device with the least.
    host_bytes: of the host beside GPUs, as in a Budget.
    """

    devices: tuple[str, ...]
    memory_bytes: int
    host_bytes: int | None = None

    @classmethod
    def find(cls, wanted: Sequence[str], memory_bytes: int | None) -> Hardware:
        """Of the devices of `parse_devices`; without `memory_bytes` most of what is free. Imports torch. Raises
        UsageError."""
        devices = choose_devices(wanted)
        memory = smallest_budget(devices) if memory_bytes is None else memory_bytes
        return cls(devices, memory, host_budget(devices[0]))

    @property
    def device(self) -> str:
        """The first device."""
        return self.devices[0]

    @property
    def budget(self) -> Budget:
        """The memory that it offers."""
        return Budget(self.memory_bytes, name_of(self.devices), self.host_bytes)

    def useful(self, manifest: Manifest, warn: Callable[[str], None]) -> Hardware:
        """The devices that a run can use: only the first one where they hold the whole model neither each nor together,
        with a warning."""
        if len(self.devices) == 1 or budget.holds_whole(manifest, self.budget):
            return self
        own, host = budget.needs_of(manifest, 0, manifest.model.n_layers, self.budget.device)
        needed, offered, of = own, self.memory_bytes, "of each"
        if self.budget.is_split and own <= offered and self.host_bytes is not None:
            needed, offered, of = host, self.host_bytes, "of the host's memory"
        warn(
            f"devices: the {len(self.devices)} do not hold the whole model together, which needs {needed / 1e6:.0f} MB"
            f" {of}, and {offered / 1e6:.0f} MB are offered; only {self.device} trains, give it alone to offer all that"
            " it has"
        )
        return dataclasses.replace(self, devices=self.devices[:1])


def name_of(devices: Sequence[str]) -> str:
    """As announced and shown: `cuda`, `2 x cuda`."""
    kind = devices[0].partition(":")[0]
    return kind if len(devices) == 1 else f"{len(devices)} x {kind}"


def smallest_budget(devices: Sequence[str]) -> int:
    """Bytes that Potluck may use on each of these devices; CPUs share their memory."""
    if devices[0] == "cpu":
        return memory_budget("cpu") // len(devices)
    return min(memory_budget(device) for device in devices)


def host_budget(device: str) -> int | None:
    """Bytes of host memory for Potluck beside `device`: 0 for an integrated GPU; None without a CUDA device."""
    if not device.startswith("cuda"):
        return None
    return 0 if _is_integrated(device) else max(1, memory_budget("cpu"))


def _is_integrated(device: str) -> bool:
    import torch

    return bool(torch.cuda.get_device_properties(device).is_integrated)


def memory_budget(device: str, root: Path = Path("/")) -> int:
    """Bytes that Potluck may use on `device` (`cuda`, `cuda:1`, `mps`, `cpu`) from now on. `root`: of the system's
    files."""
    if device.startswith("cuda") and not _is_integrated(device):
        import torch

        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    return int(min(int(psutil.virtual_memory().available), cgroup_available(root)) * CPU_SHARE)


def cgroup_available(root: Path = Path("/")) -> int:
    """Bytes that Linux control groups (a container's limit) still allow; more than any machine has if there is none.

    Version 2, then version 1; the tightest of the process's groups counts. Pages of the file cache can be dropped.
    """
    free = 1 << 62
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = base / group.lstrip("/")
        for folder in (here, *here.parents):
            free = min(free, _group_available(folder, *names))
            if folder == base:
                break
    return free


def _group_available(folder: Path, limit: str, usage: str, reclaimable: str) -> int:
    top, used = _read(folder / limit), _read(folder / usage)
    if not (top.isdecimal() and used.isdecimal()):
        return 1 << 62
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    cache = stat.get(reclaimable, "0")
    return max(0, int(top) - int(used) + (int(cache) if cache.isdecimal() else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which may not exist yet. Raises UsageError."""
    there = next((p for p in (folder.absolute(), *folder.absolute().parents) if p.exists()), Path("/"))
    try:
        return shutil.disk_usage(there).free
    except OSError as error:
        raise UsageError(f"folder {folder}: {error.strerror}; choose another folder") from None


def return_memory() -> None:
    """Returns freed memory to the system, where the C library can (glibc)."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def one_heap() -> None:
    """For the beginning of a process that trains: its threads share one heap, and freed memory stays for the next step
    until `return_memory`. glibc would give each thread heaps of 64 MB, with more unused memory between, and would
    return pages within every step (docs/results/memory.md)."""
    with contextlib.suppress(AttributeError):
        library = ctypes.CDLL(None)
        for option, value in _HEAP.items():
            library.mallopt(option, value)


def free() -> None:
    """Returns all unused memory to the system, of the device too, except some hundred MB of CUDA itself."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return_memory()


def peak_rss() -> int:
    """The largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, by Python's error, a GPU's or torch's (a RuntimeError), or an error raised from one of
    these."""
    return any(
        _is_of_host(one) or (isinstance(one, RuntimeError) and "out of memory" in str(one)) for one in _roots(error)
    )


def is_host_shortage(error: BaseException) -> bool:
    """Returns whether the host's memory ran out, and not a GPU's own."""
    return any(map(_is_of_host, _roots(error)))


def _is_of_host(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def _roots(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [root for one in error.exceptions for root in _roots(one)]
    return [error] if error.__cause__ is None else _roots(error.__cause__)
