"""A device that this machine does not have: tensors that torch takes for those of another one, whose values lie here,
and which count what crosses from it. What is on it has no `numpy()`, as with a real one; `item`, `bool`, `cpu`, `to`
and `copy_` are seen, whichever code calls them.

torch's "meta" device, which all builds have, lends its name. Seen is what the thread does that has `with StandIn() as
device:`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "meta"
_ATEN = torch.ops.aten


class OnDevice(torch.Tensor):
    """`values`: a tensor of this machine that stands for it."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=NAME,
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func}: of a tensor of the device, outside of its `with`")


class StandIn(TorchDispatchMode):
    """`to_host`: the bytes of each thing that came from the device, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        comes_from = on_device = any(isinstance(x, OnDevice) for x in given)
        if kwargs.get("device") is not None:
            on_device = kwargs["device"].type == NAME
            kwargs["device"] = torch.device("cpu")
        if func is _ATEN._local_scalar_dense.default:
            on_device = False
        if func is _ATEN.copy_.default:
            on_device = isinstance(args[0], OnDevice)
        result = func(*tree_map(_values, args), **tree_map(_values, kwargs))
        if comes_from and not on_device:
            crossed = args[0] if func is _ATEN._local_scalar_dense.default else result
            self.to_host.append(crossed.numel() * crossed.element_size())
        return tree_map(_wrapped, result) if on_device else result


def _values(x: Any) -> Any:
    return x.values if isinstance(x, OnDevice) else x


def _wrapped(x: Any) -> Any:
    return OnDevice(x) if isinstance(x, torch.Tensor) else x
