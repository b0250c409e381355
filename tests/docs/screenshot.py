"""The README's picture: the screen of a real demo, drawn again from the events that its processes wrote.

    python -m tests.docs.screenshot demo-run docs/images/demo.svg        (`make screenshot` runs the demo first)

The picture is an SVG that needs no font and no file from elsewhere.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from peer import events
from peer.events import Event
from peer.ui.screen import View, render
from protocol.identity import Identity
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest

WIDTH, HEIGHT = 122, 36
"""Characters."""
MOMENT = 0.7
"""The share of the events that have happened: within the run, where there is something to see."""
FONT = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace'


def read(folder: Path) -> tuple[Manifest, dict[str, str], list[Event]]:
    """Of a demo's folder: the run's manifest, the names of its processes by peer id, and all events in order of time."""
    manifest = manifests.from_toml((folder / "run.toml").read_bytes(), "run.toml")
    names: dict[str, str] = {}
    found: list[Event] = []
    for log in sorted(folder.glob("*/events.jsonl")):
        key = Identity.from_libp2p((log.parent / "identity.key").read_bytes())
        names[key.peer_id] = log.parent.name
        lines = log.read_text(encoding="utf-8").splitlines()
        found += [event for event in map(events.from_json, lines) if event is not None]
    return manifest, names, sorted(found, key=lambda event: event.time)


def draw(manifest: Manifest, names: dict[str, str], happened: Sequence[Event]) -> str:
    """The screen after these events, as an SVG."""
    view = View(manifest, names)
    for event in happened:
        view.feed(event)
    console = Console(
        record=True, file=io.StringIO(), width=WIDTH, height=HEIGHT, force_terminal=True, color_system="truecolor"
    )
    console.print(render(view, WIDTH, HEIGHT))
    picture = console.export_svg(title="potluck demo", unique_id="screen")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    return re.sub(r"font-family: [^;]+;", f"font-family: {FONT};", picture)


def main() -> None:
    folder, picture = map(Path, sys.argv[1:])
    manifest, names, found = read(folder)
    picture.write_text(draw(manifest, names, found[: int(len(found) * MOMENT)]), encoding="utf-8")


if __name__ == "__main__":
    main()
