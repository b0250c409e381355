"""hivemind without its training half, which imports torch and scipy: 230 MB and two seconds that a monitor has no use for.

`import hivemind.p2p` first runs `hivemind/__init__.py`, which imports everything that hivemind has. This module has the package and two of
its folders in place before, without running their `__init__`, and puts into `hivemind.utils` the names that hivemind's network modules read
from there (docs/adr/0041-hivemind-without-torch.md). Whoever imports another module of hivemind's after this one gets that module, with
what it imports; only the names of the three packages themselves are fewer. Where hivemind was imported as a whole before, nothing happens.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def _hollow(name: str) -> ModuleType:
    """The package `name`, known to the import system, of whose `__init__` nothing has run."""
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
    """Makes later imports of hivemind's network modules import those only. Raises ModuleNotFoundError without hivemind."""
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
