"""What is local to a machine. Everything run-wide is in the manifest."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import UsageError

if TYPE_CHECKING:
    from protocol.ledger.invitations import Ticket
    from protocol.planning.budget import Budget
    from protocol.run.manifest import Manifest

_HOME = "potluck-home"


@dataclass(frozen=True, slots=True, kw_only=True)
class Downlink:
    """What a measurement before the peer was built found (peer/net/bandwidth.py): bits a second, by whom, seconds there and back, and the
    bytes that it took."""

    bps: int
    by: str
    trip: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """`device`: what trains; `more_devices`: what else does, of the same kind; `memory_bytes`: what Potluck may use above an idle process, of the device that
    has least of it; `host_bytes`: of the host beside GPUs, as a Budget has it; `up_bps`, `down_bps`: bits per second, announced;
    None: measured; `up_limit_bps`: the most that chains and serving payloads and states may take; None: nine tenths of the uplink that
    was measured, else no limit; `store_bytes`: disk for payloads; None: no limit; `trace`: a file for peer/chain/trace.py;
    `corpus`: a folder that has the run's text; None: it is fetched, and at most `data_bytes` of it are kept; `announce`: addresses,
    without our id, at which the user says that we are reached; `reachable`: how we are, as found out before the start
    (peer/net/reach.py), None: that is nobody's question; `reached_at`: at which addresses, with our id; `downlink`: what was found of it
    before, None: nothing; `ticket`: the invitation with which it comes in; `audit`: it follows the log for an operator, and trains nothing (peer/node/audit.py);
    `name`: what screens call it."""

    folder: Path
    device: str = "cpu"
    more_devices: tuple[str, ...] = ()
    memory_bytes: int
    host_bytes: int | None = None
    up_bps: int | None
    down_bps: int | None
    up_limit_bps: int | None = None
    store_bytes: int | None = None
    threads: int = 1
    trace: Path | None = None
    corpus: Path | None = None
    data_bytes: int = 2_000_000_000
    announce: tuple[str, ...] = ()
    reachable: str | None = None
    reached_at: tuple[str, ...] = ()
    downlink: Downlink | None = None
    ticket: Ticket | None = None
    audit: bool = False
    name: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """All that train."""
        return self.device, *self.more_devices

    @property
    def budget(self) -> Budget:
        """What it offers of its memory."""
        from protocol.planning.budget import Budget

        return Budget(self.memory_bytes, self.device, self.host_bytes)


def why_one_device(manifest: Manifest, config: JoinConfig) -> str | None:
    """Why of several devices only the first one can be of use in a run; None where all can, or there is one."""
    from protocol.planning import budget

    if not config.more_devices or budget.holds_whole(manifest, config.budget):
        return None
    own, host = budget.needs_of(manifest, 0, manifest.model.n_layers, config.device)
    needed, offered, of = own, config.memory_bytes, "of each"
    if config.budget.is_split and own <= offered and config.host_bytes is not None:
        needed, offered, of = host, config.host_bytes, "of the host's memory"
    return (
        f"devices: each of the {len(config.devices)} must hold the whole model to train with the others, which needs"
        f" {needed / 1e6:.0f} MB {of}, and {offered / 1e6:.0f} MB are offered; only {config.device} trains, give it alone to"
        " offer all that it has"
    )


def cache_folder() -> Path:
    """Where what is the same for all runs of this user is kept: potluck/ in XDG_CACHE_HOME, by default ~/.cache. After `make_home` there is one."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "potluck"


def home() -> Path | None:
    """The user's own folder, such that something can be kept there; None where there is none, as of a user of a container whom no file lists."""
    try:
        found = Path.home()
    except RuntimeError:
        return None
    usable = found.is_dir() and (os.access(found, os.W_OK | os.X_OK) or os.access(found / ".cache", os.W_OK | os.X_OK))
    return found if usable and not found.name.startswith(_HOME) else None


def user_name() -> str:
    """The user's name, or the number of one that has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def make_home(temporary: Path | None = None) -> None:
    """Lets this process and those that it starts have a home in the folder for temporary files, and a user name, where the user has none: libraries
    keep their caches there, or fail. `temporary`: the folder for temporary files (default: the system's). Raises UsageError where there is no such folder either."""
    os.environ.setdefault("LOGNAME", user_name())
    if home() is None:
        os.environ["HOME"] = str(_temporary_home(temporary))


def _temporary_home(temporary: Path | None) -> Path:
    """The same at each start, unless another user was there first."""
    try:
        folder = (temporary or Path(tempfile.gettempdir())) / f"{_HOME}-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
        return Path(tempfile.mkdtemp(prefix=f"{_HOME}-", dir=temporary))
    except OSError as error:
        raise UsageError(f"home: this user has none, and {error.strerror}; set HOME or TMPDIR to a folder") from None
