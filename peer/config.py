"""The user's folders."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import tempfile
from pathlib import Path

from protocol.errors import UsageError

_HOME = "potluck-home"


def cache_folder() -> Path:
    """The user's folder for files of all runs: potluck/ in XDG_CACHE_HOME, by default ~/.cache. Call `make_home`
    first."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "potluck"


def home() -> Path | None:
    """The user's own writable folder; None where there is none, as for an unlisted user of a container."""
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
    """Sets a home in the folder for temporary files, and a user name, where the user has none: libraries keep caches
    there.

    temporary: default: the system's. Raises UsageError where that does not exist either.
    """
    os.environ.setdefault("LOGNAME", user_name())
    if home() is None:
        os.environ["HOME"] = str(_temporary_home(temporary))


def _temporary_home(temporary: Path | None) -> Path:
    """Returns the same folder at each start, unless another user made it first."""
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
