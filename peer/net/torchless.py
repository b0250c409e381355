"""hivemind without its training half, which imports torch and scipy: 230 MB and two seconds.

`import hivemind.p2p` first imports all of hivemind. This module registers the package and two of its folders without
running their `__init__`, and puts into `hivemind.utils` the names that its network modules read from there
(docs/adr/0041-hivemind-without-torch.md).
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def _hollow(name: str) -> ModuleType:
    """Registers the package `name` without running its `__init__`."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)
    return package


def prepare() -> None:
    """Has later imports of hivemind's network modules import those only. Raises ModuleNotFoundError."""
    if "hivemind" in sys.modules:
        return
    _hollow("hivemind")
    _hollow("hivemind.dht")
    utils = _hollow("hivemind.utils")
    from hivemind.utils import logging, serializer, timed_storage

    for module, names in (
        (logging, ("get_logger",)),
        (serializer, ("MSGPackSerializer", "SerializerBase")),
        (
            timed_storage,
            (
                "DHTExpiration",
                "MAX_DHT_TIME_DISCREPANCY_SECONDS",
                "TimedStorage",
                "ValueWithExpiration",
                "get_dht_time",
            ),
        ),
    ):
        for name in names:
            setattr(utils, name, getattr(module, name))


prepare()
