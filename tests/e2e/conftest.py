"""What several tests of this folder begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.demo import recipe
from peer.net import keyfile
from protocol.run import manifest as manifests
from tests.e2e.swarms import options


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A demo's manifest whose operator is the key in tmp_path/boot."""
    key = keyfile.load_or_create(tmp_path / "boot" / "identity.key")
    text = manifests.to_toml(recipe.make_manifest(options(tmp_path / "unused"), "0" * 64))
    old = next(line for line in text.splitlines() if line.startswith("operators"))
    path = tmp_path / "run.toml"
    path.write_text(text.replace(old, f'operators = ["{key.peer_id}"]'))
    return path
