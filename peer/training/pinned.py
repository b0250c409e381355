"""Arrays on the host that a GPU reads and writes where they are.

A GPU copies from and to ordinary memory by way of a buffer that cannot be moved: each number is written once more. The arrays that come again every
round, error feedback and the two generations of the state, are made such buffers themselves: pinned, until nobody holds them any more.

To pin an array takes longer than to copy it once, so only those are that are seen for the third time: an array that serves for one round is seen when it
is loaded and when the round's update is made. A file that is mapped never is: it is not to be kept in memory.
"""

from __future__ import annotations

import contextlib
import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

SMALLEST = 1 << 20
"""Bytes of an array that is worth it."""
SIGHTS = 3

_lock = threading.RLock()  # what frees an array may run anywhere, here too
_seen: dict[int, int] = {}
"""How often each array that is alive was seen, by its id; from SIGHTS on it was tried to pin it."""
_pinned: set[int] = set()
"""Of the process, as what is pinned is."""


def pinned(array: NDArray[np.float32], device: torch.device) -> bool:
    """Whether `device` can read and write the contiguous array where it is."""
    if device.type != "cuda" or array.nbytes < SMALLEST or not (array.flags.owndata and array.flags.writeable):
        return False
    key = id(array)
    with _lock:
        if key not in _seen:
            weakref.finalize(array, _forget, key, array.ctypes.data).atexit = False
        _seen[key] = _seen.get(key, 0) + 1
        if _seen[key] == SIGHTS and _pin(array, device):
            _pinned.add(key)
        return key in _pinned


def _pin(array: NDArray[np.float32], device: torch.device) -> bool:
    library = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(library.cudaHostRegister(array.ctypes.data, array.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # else the next call to the device would be told of this error
        torch.zeros(1, device=device)
    return False


def _forget(key: int, address: int) -> None:
    with _lock:
        del _seen[key]
        if key in _pinned:
            _pinned.remove(key)
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
