"""The demo's text: the messages that come with Potluck as a corpus, built once for this user."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from peer.config import cache_folder
from peer.corpus import sources
from peer.corpus.build import Request, build
from peer.corpus.text import CorpusReader
from peer.net.disk import Disk, disk_error
from peer.node.open_run import ASSETS
from protocol.errors import UsageError
from protocol.run import corpus
from protocol.run.corpus import INDEX

TOKENIZER = "sotu-4k.json"
SEQUENCE = 128
"""Tokens: the demo's train.sequence."""


def demo_corpus(sequence: int = SEQUENCE, say: Callable[[str], None] = lambda line: None) -> CorpusReader:
    """The corpus of sequences of so many tokens, from the user's cache folder; it is built there if it is not whole. Several processes may ask at once: one builds, the
    others wait. Raises UsageError."""
    source, disk = sources.parse("sotu"), Disk()
    tokenizer = (ASSETS / TOKENIZER).read_bytes()
    follows_from = [corpus.FORMAT, sources.fingerprint(source), hashlib.sha256(tokenizer).hexdigest(), sequence]
    folder = cache_folder() / f"corpus-{hashlib.sha256(json.dumps(follows_from).encode()).hexdigest()[:32]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if (folder / INDEX).exists():
                found = _whole(folder, disk)
                if found is not None:
                    return found
                shutil.rmtree(folder)
            say(f"builds the demo's text, once: {folder}")
            request = Request(
                sources=(source,), tokenizer=tokenizer, sequence=sequence, out=folder, workers=os.cpu_count() or 1
            )
            build(request, disk, lambda line: None, threading.Event())
    except OSError as error:
        raise disk_error(folder, error) from None
    return CorpusReader(folder, disk)


def _whole(folder: Path, disk: Disk) -> CorpusReader | None:
    """The corpus in `folder`; None where it is damaged."""
    try:
        found = CorpusReader(folder, disk)
    except UsageError:
        return None
    return None if found.missing() else found
