"""A volunteer's first minutes in a real run on this machine, recorded for pictures (tests/docs/pictures.py).

A bootstrap node and a peer train; then two volunteers join with the line that the node prints. One tells its events, of
which the screen of `potluck join` is drawn at any size; it leaves by Ctrl-C when its work counts. The other one has a
terminal, and stays to the end of the run, as the first peer does. `potluck monitor` serves the page meanwhile.
"""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
import pty
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from peer import events
from peer.demo.recipe import DemoOptions, demo_corpus, make_manifest
from peer.events import Event
from peer.ui.join_screen import JoinScreen
from protocol.identity import Identity
from protocol.run.manifest import AdmissionSpec, EvaluationSpec, Manifest, TimingSpec
from tests.faults.processes import Swarm
from tests.support import potluck

KEY = Identity(bytes([7] * 32))
"""The node's."""
ROUNDS, PROBATION, ROUND_SECONDS, INNER_STEPS = 32, 8, 6.0, 12
SECONDS = (5, 20, 60)
"""After `potluck join` was typed."""
NODE, FIRST, TOLD = "node-0", "first", "told"
"""The processes that tell events."""
NAMES = {FIRST: "Grace", TOLD: "Ada"}
ON_TERMINAL = "Lin"
TERMINAL = (80, 24)
"""Characters."""
HOME, BACK = "\x1b[H", "\x1b[?1049l"
"""Before each frame, and where the screen goes."""


def manifest() -> Manifest:
    """The demo's model and text, in short rounds, with the probation of a usual run."""
    made = make_manifest(DemoOptions(full=1, chains=0, inner_steps=INNER_STEPS, rounds=ROUNDS), demo_corpus().digest)
    return dataclasses.replace(
        made,
        name="presidents",
        operators=(KEY.peer_id,),
        timing=TimingSpec(round_deadline=120.0, round_seconds=ROUND_SECONDS, heartbeat=1.0, gone_after=20.0),
        admission=AdmissionSpec(probation=PROBATION),
        evaluation=EvaluationSpec(every=4, sequences=16),
    )


class OnTerminal:
    """A `potluck` command on a terminal of TERMINAL characters, whose output is kept. Use as `with`."""

    def __init__(self, *words: object) -> None:
        self._ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", TERMINAL[1], TERMINAL[0], 0, 0))
        self._said: list[tuple[float, bytes]] = []
        self._process = potluck.Popen(
            *words,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"},
        )
        os.close(its)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._ours, 1 << 16):
                self._said.append((time.time(), piece))
        except OSError:  # the other end is closed
            pass

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        os.close(self._ours)

    def ended(self) -> int:
        """Its exit code, as soon as it has ended."""
        code = self._process.wait()
        self._reader.join()
        return code

    def shown(self, at: float) -> Text:
        """What is on the terminal then: the last whole frame, or what is left when the screen has gone."""
        said = b"".join(piece for when, piece in self._said if when <= at).decode(errors="replace").replace("\r", "")
        _, back, after = said.rpartition(BACK)
        frames = said.split(HOME)
        return Text.from_ansi(after if back else frames[-2] if len(frames) > 1 else said)


@dataclasses.dataclass
class Story:
    """What a volunteer is told until a moment. `began`: when `potluck join` was typed; times are Unix seconds."""

    name: str
    called: str
    began: float
    at: float
    me: str
    told: Sequence[Event]
    terminal: Text
    """What was on the other volunteer's terminal then."""

    def shown(self, width: int, height: int) -> RenderableType:
        """What a terminal of this size shows then; when the peer has ended, what is left on it."""
        now, out = self.began, io.StringIO()
        console = Console(
            file=out, width=width, height=height, force_terminal=True, color_system="truecolor", legacy_windows=False
        )
        screen = JoinScreen(self.me, self.called, console, clock=lambda: now)
        ends = [event for event in self.told if isinstance(event.body, events.Left)]
        with screen:
            for event in self.told[: -1 if ends else None]:
                now = event.time
                screen.feed(event)
            if not ends:
                now = self.at
                return screen.frame()
        for event in ends:
            screen.feed(event)
        left = out.getvalue().rpartition(BACK)[2].rstrip("\n").split("\n")
        return Text.from_ansi("\n".join(left[-height:]))


def record(folder: Path, page: Callable[[str, str], None]) -> Iterator[Story]:
    """Runs it in `folder`; the story until each moment, which pages have as soon as a browser is ready. `page`: called
    with a moment's name and the page's address."""
    with Swarm(folder, manifest(), (KEY,)) as swarm:
        swarm.options = {name: ["--name", called] for name, called in NAMES.items()}
        swarm.fetches, swarm.measures = {TOLD}, {TOLD}
        swarm.start_all(FIRST)
        line = str(swarm.wait(NODE, lambda e: e.kind == "listening", "its line").fields["line"])
        swarm.lines[TOLD] = line
        with open(folder / "monitor.txt", "wb") as said:
            swarm.running["monitor"] = potluck.Popen(
                "monitor", line, "--json", "--web", port := potluck.free_port(), stdout=said, stderr=said
            )
        url = f"http://127.0.0.1:{port}/"
        swarm.committed(NODE, 2)
        began = time.time()
        swarm.start(TOLD)
        options = ("--host", "127.0.0.1", "--dir", folder / "terminal", "--name", ON_TERMINAL, "--device", "cpu")
        with OnTerminal("join", line, *options, "--threads", 1) as terminal:

            def story(name: str, at: float, of: str = TOLD, began: float = began) -> Story:
                page(name, url)
                me, shown = swarm.started(of), terminal.shown(at)
                return Story(name, NAMES[of], began, at, me, tuple(e for e in swarm.events(of) if e.time <= at), shown)

            for second in SECONDS:
                time.sleep(max(0.0, began + second - time.time()))
                yield story(f"second-{second}", began + second)
            swarm.wait(TOLD, lambda e: e.kind == "round" and e.fields["own_tokens"] > 0, "a round that has its work")
            yield story("counted", time.time())
            swarm.running[TOLD].send_signal(signal.SIGINT)
            swarm.ended(TOLD)
            yield story("left", time.time())
            swarm.wait(NODE, lambda e: e.kind == "run_finished", "the end of the run")
            swarm.ended(FIRST)
            terminal.ended()
            started = swarm.wait(FIRST, lambda e: e.kind == "found", "its run")
            yield story("over", time.time(), FIRST, started.time)
