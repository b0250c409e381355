"""Parts that unit tests of access share with others."""

from __future__ import annotations

from typing import Any

from protocol.run.manifest import Manifest
from protocol.wire import encoding
from protocol.wire.commit import DOMAIN
from protocol.wire.decree import Decree, Enacted
from tests.support import tiny

ONE = tiny.manifest()


def decree(action: str, subject: str = "", *, number: int = 0, manifest: Manifest = ONE, **more: Any) -> Decree:
    return Decree(**{"run": manifest.run_id, "number": number, "action": action, "subject": subject, **more})


def signed(wish: Decree, *keys: Any) -> Enacted:
    body = DOMAIN + encoding.encode(wish)
    return Enacted(decree=wish, signatures={key.peer_id: key.sign(body) for key in keys})
