"""A swarm of real processes, each started as a person starts it, that can be killed and started again by name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bootstrap.archive import Archive
from peer.demo.recipe import demo_corpus
from peer.events import Event, from_json
from peer.log import replay
from protocol.identity import Identity
from protocol.planning import memory
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from tests.support import potluck
from tests.support.lab import Place

DEADLINE = 300.0
"""Seconds for anything to happen."""


class Thief:
    """Steals a process's time while the block lasts: of every `period` seconds it runs for this `share`."""

    def __init__(self, process: subprocess.Popen[bytes], share: float, period: float) -> None:
        self._process, self._running, self._stopped = process, share * period, (1 - share) * period
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._steal)

    def _steal(self) -> None:
        while not self._over.wait(self._running):
            self._process.send_signal(signal.SIGSTOP)
            self._over.wait(self._stopped)
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Thief:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


class Tail:
    """The events in a file, read as they come."""

    def __init__(self, path: Path) -> None:
        self.path, self.events, self._at = path, list[Event](), 0

    def read(self) -> list[Event]:
        """All events so far."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self._at)
            read = file.read()
            whole = read[: read.rfind(b"\n") + 1]
            self._at += len(whole)
            self.events += [event for line in whole.decode().splitlines() if (event := from_json(line)) is not None]
        return self.events

    def look(self, wanted: Callable[[Event], bool], after: int = 0) -> Iterator[Event | None]:
        """The first event that is `wanted`, those before `after` not counted; None as long as there is none. Each is
        looked at once: to look at all of them again and again costs more than the processes that tell them."""
        while True:
            for event in self.read()[after:]:
                after += 1
                if wanted(event):
                    yield event
            yield None


class Swarm:
    """The bootstrap nodes of `manifest`, whose keys are `keys`, and peers; `memory` of a peer, if not for a full
    replica;
    `places`: the address of a process and what its command begins with, if not on this machine's loopback; `module`:
    what is run (`tests.faults.paced`: peers that leave the machine to others most of the time);
    `corpus`: the folder of the text that all have (default: the demo's)."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        keys: tuple[Identity, ...],
        memory: dict[str, int] | None = None,
        places: dict[str, Place] | None = None,
        module: str = "peer.cli",
        corpus: Path | None = None,
    ) -> None:
        self.folder = folder
        self.module = module
        self.memory = memory or {}
        self.options: dict[str, list[str]] = {}
        """More of a process's options, by its name."""
        self.lines: dict[str, str] = {}
        """What a peer was given to join with, if not the first node's address."""
        self.measures: set[str] = set()
        """Peers that measure their lines."""
        self.roams: set[str] = set()
        """Peers that pause on battery and on a metered connection; the others do not look."""
        self.fetches: set[str] = set()
        """Peers that have no text, and fetch it, in an empty home."""
        self.serves_text = True
        """Whether the nodes do."""
        self.places = places or {}
        self.manifest = manifest
        self.corpus = corpus or demo_corpus(manifest.train.sequence).folder
        self.file = folder / "run.toml"
        folder.mkdir(parents=True)
        self.file.write_text(manifests.to_toml(manifest))
        self.nodes = [f"node-{i}" for i in range(len(manifest.operators))]
        self.ids = dict(zip(self.nodes, manifest.operators, strict=True))
        for name, key in zip(self.nodes, keys, strict=True):
            (folder / name).mkdir()
            (folder / name / "identity.key").write_bytes(key.libp2p_bytes())
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: list[str] = []
        self.ports: dict[str, int] = {}
        self._tails: dict[str, Tail] = {}

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        """Starts a process, or starts it again; events go on in the same file."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        host, prefix = self.places.get(name, ("127.0.0.1", []))
        common = ["--dir", folder, "--host", host, "--port", self.ports.get(name, 0), "--json"]
        if name in self.nodes:
            known = [x for address in self.addresses for x in ("--initial-peer", address)]
            arguments = ["bootstrap", self.file, *common, *known]
            arguments += ["--corpus", self.corpus] if self.serves_text else []
            arguments += self.options.get(name, [])
        else:
            whole = memory.stage_memory(self.manifest, 0, self.manifest.model.n_layers)
            device = [] if "--devices" in self.options.get(name, []) else ["--device", "cpu"]
            offer = [*device, "--memory", self.memory.get(name, whole), "--threads", 1]
            offer += [] if name in self.measures else ["--up", "20Mbps", "--down", "100Mbps"]
            offer += [] if name in self.roams else ["--on-battery", "--on-metered"]
            arguments = [
                "join",
                self.lines.get(name, self.addresses[0]),
                *common,
                *offer,
                *([] if name in self.fetches else ["--corpus", self.corpus]),
                *self.options.get(name, []),
            ]
        home = {"HOME": str(folder / "home"), "XDG_CACHE_HOME": ""} if name in self.fetches else {}
        with open(folder / "events.jsonl", "ab") as out, open(folder / "stderr.txt", "ab") as errors:
            self.running[name] = potluck.Popen(
                *arguments, module=self.module, before=prefix, stdout=out, stderr=errors, env=os.environ | home
            )

    def start_node(self, name: str) -> None:
        """Starts a bootstrap node for the first time and waits for its address, which it keeps."""
        self.ports.setdefault(name, potluck.free_port())
        self.start(name)
        self.addresses.append(self.wait(name, lambda e: e.kind == "listening", "its address").fields["address"])

    def start_all(self, *peers: str) -> None:
        """Starts all nodes for the first time, then these peers."""
        for name in self.nodes:
            self.start_node(name)
        for name in peers:
            self.start(name)

    def started(self, name: str) -> str:
        """The id of a peer, once it has started."""
        return str(self.wait(name, lambda e: e.kind == "started", "its start").fields["peer"])

    def committed(self, name: str, round: int) -> Event:
        """The first commit of `round` or a later one that `name` tells of."""
        return self.wait(name, lambda e: e.kind == "commit" and e.fields["round"] >= round, f"round {round}")

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self.running.pop(name)
        if process.poll():
            errors = (self.folder / name / "stderr.txt").read_text()[-2000:]
            raise AssertionError(f"{name} had ended with {process.returncode}: {errors}")
        process.send_signal(signal.SIGKILL)
        process.wait()

    def ended(self, name: str) -> int:
        """The exit code of a process that ends by itself."""
        code = self.running[name].wait(DEADLINE)
        del self.running[name]
        return code

    def events(self, name: str) -> list[Event]:
        """Those of `name` so far."""
        return list(self._tail(name).read())

    def _tail(self, name: str) -> Tail:
        if name not in self._tails:
            self._tails[name] = Tail(self.folder / name / "events.jsonl")
        return self._tails[name]

    def wait(self, name: str, wanted: Callable[[Event], bool], what: str, after: int = 0) -> Event:
        """The first event of `name` that is `wanted`, those before `after` not counted."""
        end, looks = time.monotonic() + DEADLINE, self._tail(name).look(wanted, after)
        while time.monotonic() < end:
            if (event := next(looks)) is not None:
                return event
            for other, process in self.running.items():
                if process.poll():
                    errors = (self.folder / other / "stderr.txt").read_text()[-2000:]
                    raise AssertionError(f"{other} ended with {process.returncode} before {what} of {name}: {errors}")
            time.sleep(0.05)  # the file has no other sign of news
        raise AssertionError(f"{name}: {what} did not happen")

    def leader(self) -> str:
        """Which node leads, by what the nodes said last."""
        said = {}
        for name in self.nodes:
            for event in self.events(name):
                if event.kind == "leads" and name in self.running:
                    said[name] = (event.fields["leads"], event.time)
        return max((at, name) for name, (leads, at) in said.items() if leads)[1]

    def errors(self, name: str) -> str:
        """What a process has said of errors so far."""
        return (self.folder / name / "stderr.txt").read_text()

    # --- afterwards, when everybody has ended

    @contextlib.contextmanager
    def log_of(self, node: str) -> Iterator[Archive]:
        """A node's log, read from its beginning with all its checks."""
        archive = Archive(self.folder / node, self.manifest)
        try:
            yield archive
        finally:
            archive.close()

    def logs(self) -> Iterator[tuple[str, Archive]]:
        """Every node's, one after the other."""
        for name in self.nodes:
            with self.log_of(name) as archive:
                yield name, archive

    def check(self) -> int:
        """All logs tell one history, a majority of the nodes holds each payload, these replay it, and everybody
        attested and ended with just those bits. The last round."""
        digests: dict[int, dict[str, str]] = {}
        with contextlib.ExitStack() as stack:
            archives = {name: stack.enter_context(self.log_of(name)) for name in self.nodes}
            longest = max(archives.values(), key=lambda archive: len(archive.commits)).commits
            for name, archive in archives.items():
                history = [commit.digest for commit in archive.commits]
                assert history == [commit.digest for commit in longest[: len(history)]], f"{name} has another history"

            def payload(digest: str) -> bytes | None:
                found = [data for archive in archives.values() if (data := archive.blobs.get(digest)) is not None]
                assert 2 * len(found) > len(archives), (
                    f"payload {digest[:12]}: {len(found)} of {len(archives)} nodes hold it"
                )
                return found[0]

            for state in replay.replay(self.manifest, longest, payload):
                digests[state.round] = state.digests
        attested = 0
        for name in self.nodes:
            for event in self.events(name):
                assert event.kind != "diverged", event
                if event.kind == "attest":
                    attested += 1
                    for shard, digest in event.fields["digests"].items():
                        assert digest == digests[event.fields["round"]][shard], event
        rounds = len(longest) - 1
        assert attested >= rounds
        for path in self.folder.glob("*/events.jsonl"):
            for event in self.events(path.parent.name):
                if event.kind == "finished" and path.parent.name not in self.nodes:
                    assert event.fields["round"] == rounds
                    assert event.fields["digests"].items() <= digests[rounds].items()
        return rounds
