"""The commands that the documents show are typed here, and do what they say, on one machine and in one small run. The
tutorial's are typed in a run of their own (test_new_user.py).

What is added to a command keeps it on this machine (its address, its port, the memory that it offers); what stands for
something, such as ADDRESS, is put in. A command that is in no document any more, or in a document and not here, fails.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from peer.node.open_run import ASSETS
from tests.docs import typed
from tests.faults.processes import Swarm
from tests.faults.roles import NODE
from tests.support import potluck, systemd, tiny
from tests.support.roles import make_manifest

APPOINTED = "tests/e2e/test_appoint.py"
DOCTOR = "tests/e2e/test_doctor.py"
SITE = "tests/e2e/test_site.py"
PROCESSES = "tests/faults/processes.py"
ELSEWHERE = {
    "potluck doctor ADDRESS --json": DOCTOR,
    "potluck doctor ADDRESS --devices 0,1,2,3": DOCTOR,
    "potluck join ADDRESS --devices 0,1,2,3": "tests/e2e/test_several_devices.py",
    "potluck join ADDRESS --site 192.168.1.5:7100 --rank 0/2": SITE,
    "potluck join ADDRESS --site 192.168.1.5:7100/SECRET --rank 1/2": SITE,
    "potluck bootstrap run.toml --initial-peer ADDRESS": PROCESSES,
    "potluck join LINE": "tests/hostile/test_invitations.py",
    "potluck eval demo-run/bootstrap --tasks hellaswag,arc_easy": "tests/e2e/test_export.py",
    "potluck export demo-model --push OWNER/NAME": "tests/unit/peer/cli/test_export_command.py",
    "potluck init my-run text/*.parquet --from demo-model": "tests/e2e/test_from.py",
    "potluck bootstrap my-run.toml --corpus corpus --dir my-node --port 4001 --initial-peer ADDRESS": PROCESSES,
    'potluck run appoint ADDRESS LINE LINE LINE --reason "three more"': APPOINTED,
    "potluck run quorum ADDRESS 4": APPOINTED,
    "potluck run dismiss ADDRESS 4kx6nXTN": APPOINTED,
}
"""Commands that need more than this run, or take long, by the test that types them."""
REACHES = r"is here: |\"event\": \"started\""
SIGNS = {
    "potluck bootstrap": r"to join: potluck join [a-z0-9-]+@127",
    "potluck join": REACHES,
    "potluck join ADDRESS --hours": rf"{REACHES}|pauses: outside of its hours",
    "potluck monitor": r"round \d+|\"round\":",
    "potluck monitor ADDRESS --web 8080": r"the page: http://127",
    "potluck monitor ADDRESS --web 0.0.0.0:8080": r"the page: http://0.0.0.0",
    "potluck monitor ADDRESS --metrics 9100": r"Prometheus: http://127\.0\.0\.1:\d+/metrics",
}
"""Commands that go on: what they say before Ctrl-C ends them, by how they begin; the longest counts."""
ENDS = ("potluck monitor ADDRESS --once", "potluck monitor run.toml --replay", "potluck monitor demo-run/bootstrap")
"""Commands that end by themselves, though others of the same name go on."""
SAYS = {
    "potluck me": "is you",
    "potluck log verify": "digests",
    "potluck service status": "runs since",
    "potluck run ban": "decided",
    "potluck run card": '"signature": "',
    "potluck run set": "decided",
    "potluck data show": "held out",
    "potluck plan": "replica",
}
TUTORIAL = typed.ROOT / "docs" / "tutorial.md"
ALL = list(dict.fromkeys((document, command) for document in typed.DOCUMENTS for command in typed.shown(document)))
BY_DOCUMENT = {d: [c for found, c in ALL if found == d] for d in dict.fromkeys(found for found, _ in ALL)}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass
class Town:
    """A run whose node and peer live, and a shell."""

    swarm: Swarm
    shell: typed.Shell
    prepared: Path

    @property
    def peer(self) -> str:
        """The id of the peer that trains."""
        return str(next(e.fields["peer"] for e in self.swarm.events("a") if e.kind == "started"))

    def folder(self, name: str) -> Path:
        """A working folder with what the documents take for granted."""
        at = self.prepared.parent / name
        at.mkdir()
        for path in self.prepared.iterdir():
            (at / path.name).symlink_to(path)
        return at

    def filled_in(self, command: str) -> str:
        """The command as it can be typed here."""
        port = str(potluck.free_port())
        words = {
            "ADDRESS": shlex.quote(self.swarm.addresses[0]),
            "PEER": self.peer[-12:],
            "Ada·p8kZ": f"Ada·{self.peer[-4:]}",
            "FOLDER": "my-folder",
            "8080": "0",
            "0.0.0.0:8080": "0.0.0.0:0",
            "9100": "0",
            "4001": port,
        }
        found = " ".join(words.get(word, word) for word in command.split(" "))
        name = " ".join(command.split()[1:3])
        verb = command.split()[1]
        if verb in ("run", "invite"):
            found = found.replace("my-run/run.toml", shlex.quote(str(self.swarm.file)))
            found += f" --dir {shlex.quote(str(self.swarm.folder / NODE))}"
        if verb in ("join", "bootstrap"):
            found += " --host 127.0.0.1"
        if verb == "join":
            found += f" --device cpu --threads 1 --memory {tiny.full_memory(self.swarm.manifest)}"
            found += "" if "--up " in found else " --up 20Mbps --down 100Mbps"
            found += "" if "--corpus" in found else f" --corpus {shlex.quote(str(self.swarm.corpus))}"
        if verb == "bootstrap":
            found += " --port 0" + ("" if "--corpus" in found else " --corpus my-run/corpus")
        if name == "service install" and "--memory" not in found:
            found += " --memory 8GB"
        return found


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    """A node and a full replica with decided rounds; a run by the README's own command; a list of machines."""
    folder = tmp_path_factory.mktemp("typed")
    calls = folder / "calls"
    shell = typed.Shell.of(folder / "user", {"systemctl": systemd.PROGRAM.format(calls=calls)})
    prepared = folder / "prepared"
    (prepared / "text").mkdir(parents=True)
    documents = [f"{i} Strangers cook one meal together. Each brings what there is at home. " * 40 for i in range(4400)]
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), prepared / "text" / "a.parquet")
    shutil.copy(ASSETS / "sotu-4k.json", prepared / "tokenizer.json")
    manifest = make_manifest(start_peers=1)
    with Swarm(folder / "run", manifest, tiny.OPERATORS[:1], module="tests.faults.paced") as swarm:
        swarm.start_node(NODE)
        swarm.start("a")
        made = shell.type("potluck init my-run text/*.parquet", prepared)
        assert made.code == 0, made.said
        shutil.copy(prepared / "my-run" / "run.toml", prepared / "my-run.toml")
        shutil.copytree(prepared / "my-run" / "node", prepared / "potluck-bootstrap")
        shutil.copy(swarm.file, prepared / "run.toml")
        for name in ("text.txt", "message.txt"):
            (prepared / name).write_text("We the people of one kitchen cook one meal together.\n" * 20)
        machines = re.search(
            r"^```\n(manifest = .*?)^```", (typed.ROOT / "docs/guides/plan.md").read_text(), re.M | re.S
        )
        (prepared / "my-peers.toml").write_text(machines[1])
        swarm.committed(NODE, 3)
        shutil.copytree(swarm.folder / NODE, prepared / "demo-run" / "bootstrap", ignore=shutil.ignore_patterns("lock"))
        shutil.copy(swarm.folder / NODE / "events.jsonl", prepared / "events.jsonl")
        yield Town(swarm, shell, prepared)


def sign_of(command: str) -> str | None:
    if command.startswith(ENDS):
        return None
    return max(((len(k), v) for k, v in SIGNS.items() if command.startswith(k)), default=(0, None))[1]


@pytest.mark.parametrize("document", [d for d in BY_DOCUMENT if d != TUTORIAL], ids=lambda path: path.name)
def test_what_a_document_shows_does_what_it_says(town: Town, document: Path) -> None:
    at = town.folder(document.stem)
    order = list(BY_DOCUMENT)
    before = {c for earlier in (TUTORIAL, *order[: order.index(document)]) for c in BY_DOCUMENT[earlier]}
    for command in BY_DOCUMENT[document]:
        if command in ELSEWHERE or (command in before and "--dir" not in command and "service" not in command):
            continue
        prepare(command, at, town)
        text = "The people\n" if "--interactive" in command else None
        ended = town.shell.type(town.filled_in(command), at, sign_of(command), text)
        assert "Traceback" not in ended.said, (command, ended.said)
        assert ended.code == 0, (command, ended.code, ended.said[-2000:])
        expected = sign_of(command) or next((v for k, v in SAYS.items() if command.startswith(k)), "")
        assert re.search(expected, ended.said), (command, ended.said[-2000:])


def prepare(command: str, at: Path, town: Town) -> None:
    """What the text around the command says is there, or is not."""
    if command.startswith("potluck init my-run"):
        made = at / "my-run"
        if made.is_symlink():
            made.unlink()
        shutil.rmtree(made, ignore_errors=True)
    corpus = at / "corpus"
    if "--corpus corpus" in command or "--out corpus" in command:
        if corpus.is_symlink():
            corpus.unlink()
        shutil.rmtree(corpus, ignore_errors=True)
    if "--corpus corpus" in command:
        corpus.symlink_to(town.swarm.corpus if "join" in command else town.prepared / "my-run" / "corpus")


def test_what_is_typed_elsewhere_is_still_shown_and_typed_there() -> None:
    shown = {command for _, command in ALL}
    for command, test in ELSEWHERE.items():
        assert command in shown
        source = (typed.ROOT / test).read_text()
        for option in (word for word in command.split() if word.startswith("--")):
            assert option in source
