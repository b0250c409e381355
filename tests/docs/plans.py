"""The plans that docs/guides/plan.md shows, made by its commands: `python -m tests.docs.plans` writes them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from peer.cli import main
from tests.docs import typed
from tests.support import tiny
from tests.support.texts import write_corpus

PATH = typed.ROOT / "docs" / "guides" / "plan.md"
PRESET = "1b"
SEQUENCE, VOCABULARY = 2048, 32_000
"""Of that preset."""


def documentation() -> str:
    """The guide, with what its commands print today in the place of what they printed."""
    before = PATH.read_text(encoding="utf-8")
    machines, *printed = re.findall(r"^```\n(.*?)^```", before, re.MULTILINE | re.DOTALL)
    commands = [command for command in typed.shown(PATH) if "my-peers.toml" in command]
    found = before
    with tempfile.TemporaryDirectory() as name, working_in(Path(name)):
        Path("my-peers.toml").write_text(machines, encoding="utf-8")
        key = Path("example") / "node" / "identity.key"
        key.parent.mkdir(parents=True)
        key.write_bytes(tiny.OPERATOR.libp2p_bytes())
        key.chmod(0o600)
        write_corpus(Path("corpus"), 100, SEQUENCE, VOCABULARY, tokens=10**10)
        said(f"potluck init example --corpus corpus --preset {PRESET}")
        Path("run.toml").write_bytes(Path("example/run.toml").read_bytes())
        for command, old in zip(commands, printed, strict=True):
            found = found.replace(f"```\n{old}```", f"```\n{said(command)}```")
    return found


def said(command: str) -> str:
    """What it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main.main(command.split()[1:])
    return out.getvalue()


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """The current folder is this one while the block lasts."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    PATH.write_text(documentation(), encoding="utf-8")
