"""The local settings of a peer, and its machine as found. Run-wide settings are in the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from peer.net.bandwidth import Measurement
from peer.net.reach import Reachability
from peer.node.open_run import Door, Run
from peer.node.pausing import Hours
from peer.training.device import Hardware
from peer.training.site import Gathering, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """The options of `potluck join`, read once. Rates are in bits per second."""

    run: Run
    """The run to join, and the invitation, if one was given."""
    folder: Path
    """Key, state and payloads."""
    door: Door = field(default_factory=lambda: Door(host="0.0.0.0"))
    """Where the peer listens, and the addresses that its user announces."""
    devices: tuple[str, ...] = ("cpu",)
    """As typed: they may say `auto`, or name GPUs that are not there."""
    memory_bytes: int | None = None
    """To offer of each device; None: most of what is free."""
    up_bps: int | None = None
    """To announce; None: it is measured."""
    down_bps: int | None = None
    """To announce; None: it is measured."""
    up_limit_bps: int | None = None
    """The most that chains and serving may take; None: nine tenths of the measured uplink, no limit with `up_bps`."""
    store_bytes: int | None = None
    """Disk for payloads; None: no limit."""
    threads: int = 1
    """For training."""
    trace: Path | None = None
    """A file for peer/chain/trace.py."""
    corpus: Path | None = None
    """A folder with the run's text; None: the text is fetched."""
    data_bytes: int = 2_000_000_000
    """Disk for text that was fetched."""
    hours: Hours | None = None
    """When the peer trains; None: always."""
    on_battery: bool = False
    """Train on battery, too."""
    on_metered: bool = False
    """Train on a metered connection, too."""
    pause_when_busy: bool = False
    """Leave the machine to other programs while they use it."""
    name: str = ""
    """What screens call the peer."""
    dry_run: bool = False
    """Say what the peer would do, and leave."""
    plain: bool = False
    """Print lines instead of a screen."""
    json: bool = False
    """Print events as JSON."""
    site: Site | None = None
    """This machine's place among several that are one peer; None: it is a peer alone."""
    audit: bool = False
    """Follow the log for an operator, and train nothing (peer/node/audit.py)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A peer's machine as it was found before the peer starts."""

    config: JoinConfig
    hardware: Hardware
    reached: Reachability | None = None
    """How others reach it (peer/net/reach.py); None: it listens to itself only."""
    downlink: Measurement | None = None
    """What was measured of the downlink; None: nothing."""
    site: Gathering | None = None
    """The other machines, of each of which `hardware` has a device; None: there are none."""
