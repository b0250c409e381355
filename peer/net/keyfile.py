"""The file with a peer's secret key."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from peer.net.disk import flush
from protocol.errors import UsageError
from protocol.identity import SEED_BYTES, Identity, IdentityError


def load_or_create(path: Path) -> Identity:
    """The identity in `path`, a new one if there is no such file. Raises IdentityError, UsageError."""
    try:
        try:
            return Identity.from_libp2p(path.read_bytes())
        except FileNotFoundError:
            pass
        identity = Identity(secrets.token_bytes(SEED_BYTES))
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(identity.libp2p_bytes())
            file.flush()
            flush(file.fileno())
        try:
            os.link(fresh, path)  # fails if another process was first
        except FileExistsError:
            pass
        except OSError:  # a disk without hard links: of two processes at the same moment, the later one's key stays
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
        return Identity.from_libp2p(path.read_bytes())
    except IdentityError as error:
        raise IdentityError(f"{path}: {error}") from None
    except OSError as error:
        raise UsageError(
            f"key {path}: {error.strerror or error}; check the folder and its rights, or choose another with --dir"
        ) from None
