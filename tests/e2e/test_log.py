"""`potluck log`: a run that went well verifies, and every kind of damage is named by round and shard."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootstrap.archive import Archive
from peer.cli import main
from peer.net import keyfile
from protocol.identity import Identity
from protocol.ledger import aggregation, part_lists
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest
from protocol.wire import encoding, logfile
from protocol.wire.commit import Commit, Diverged, LeftOut, Part, Share
from tests.e2e import swarms
from tests.support import tiny
from tests.support.potluck import Popen, run


@dataclasses.dataclass(frozen=True)
class Done:
    """A demo that went well: `folder` is its bootstrap node's."""

    out: Path
    folder: Path
    manifest: Manifest
    result: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two full replicas and a chain of two, three rounds."""
    out = tmp_path_factory.mktemp("log") / "run"
    chosen = swarms.options(out, full=2, chains=1, residual_width=8)
    return Done(out, out / "bootstrap", swarms.manifest(chosen), swarms.run(chosen))


@pytest.fixture
def copy(done: Done, tmp_path: Path) -> Done:
    """The same, to be damaged."""
    shutil.copytree(done.folder, tmp_path / "bootstrap")
    return dataclasses.replace(done, folder=tmp_path / "bootstrap")


class Potluck:
    """Runs `potluck log …` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> tuple[list[str], list[str]]:
        """(lines of output, lines of errors) of a command that must end with `code`."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main.main(["log", *map(str, arguments)])
        said = self._capsys.readouterr()
        assert (end.value.code or 0) == code, said
        return said.out.splitlines(), said.err.splitlines()


@pytest.fixture
def potluck(capsys: pytest.CaptureFixture[str]) -> Potluck:
    return Potluck(capsys)


def commits(folder: Path) -> list[tuple[int, bytes, Commit]]:
    """(position, bytes, commit) of every record."""
    with open(folder / "log", "rb") as file:
        found = []
        for at, raw in logfile.records(file, folder / "log"):
            found.append((at, raw, encoding.decode_record(raw, "the log").commit))
        return found


def framed(raw: bytes) -> bytes:
    """A record as it stands in the file."""
    return struct.pack(">II", len(raw), zlib.crc32(raw)) + raw


def rewrite(folder: Path, change: Callable[[int, Commit], Commit], key: Identity) -> None:
    """Writes the log again with changed commits, signed by `key`, whose parents and CRCs are right."""
    parent, out = None, b""
    for _, _, commit in commits(folder):
        commit = change(commit.round, dataclasses.replace(commit, parent=parent or commit.parent))
        parent = commit.digest
        out += framed(encoding.encode_record(tiny.record(commit, key)))
    (folder / "log").write_bytes(out)


def a_payload(folder: Path, round: int, shard: str) -> Path:
    commit = commits(folder)[round][2]
    _, part, _ = commit.payloads(shard, {share.root: parts(folder, share) for share in commit.shares})[0]
    return folder / "blobs" / part.digest


def parts(folder: Path, share: Share) -> tuple[Part, ...]:
    return part_lists.unpack((folder / "blobs" / share.root).read_bytes())


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


# --- aggregates


def test_peers_apply_the_aggregates_that_nodes_make_and_the_log_verifies(tmp_path: Path, potluck: Potluck) -> None:
    """Real processes and daemons; then a log that names another aggregate."""
    out = tmp_path / "run"
    chosen = swarms.options(out, full=2, chains=1, residual_width=8, in_memory=False)
    manifest, folder = swarms.manifest(chosen, outer={"aggregate_topk": 8}), out / "bootstrap"
    result = swarms.run(chosen, manifest)
    assert (result["same_bits"], result["left_out"]) == (True, [])
    log = [commit for _, _, commit in commits(folder)]
    worked = [commit for commit in log if commit.contributions]
    assert [aggregation.is_aggregated(manifest, commit) for commit in worked] == [True] * 3
    first, second = (commit.aggregates for commit in log if commit.aggregates)
    for name in ("full-0", "full-1"):
        blobs = {path.name for path in (out / name / "blobs").iterdir()}
        assert {each.digest for each in (*first, *second)} <= blobs, "it fetched them, and computed none"
    potluck("verify", folder)
    false = (dataclasses.replace(first[0], digest=second[0].digest), *first[1:])
    key = keyfile.load_or_create(folder / "identity.key")
    rewrite(folder, lambda _, c: dataclasses.replace(c, aggregates=false) if c.aggregates == first else c, key)
    lines, _ = potluck("verify", folder, code=1)
    assert any(f"{first[0].shard}: its updates give aggregate" in line for line in lines), lines


# --- credits


def test_credits_are_the_tokens_of_the_log(done: Done, potluck: Potluck) -> None:
    lines, errors = potluck("credits", done.folder, "--json")
    assert errors == []
    found = [json.loads(line) for line in lines]
    total = sum(c.tokens for _, _, commit in commits(done.folder) for c in commit.contributions)
    assert sum(one["tokens"] for one in found) == total
    assert {one["peer"] for one in found} == {
        p for _, _, commit in commits(done.folder) if commit.plan for p in commit.plan.peers
    }
    assert all(one["rounds"] == one["streak"] == 3 for one in found)
    table, _ = potluck("credits", done.folder)
    assert table[0] == f"4 contributors after round 3, {total:,} tokens"
    assert len(table) == 6


def test_me(done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def me(folder: Path) -> str:
        with pytest.raises(SystemExit) as end:
            main.main(["me", str(done.folder), "--dir", str(folder)])
        said = capsys.readouterr()
        return said.err if end.value.code else said.out

    assert re.search(r"you trained [\d,]+ tokens, \d+\.\d% of the run: rank \d of 4", me(done.out / "full-0"))
    assert "has no key of a peer" in me(tmp_path)
    keyfile.load_or_create(tmp_path / "identity.key")
    assert "you are in no round yet" in me(tmp_path)


# --- show


def test_show_tells_who_did_what(done: Done, potluck: Potluck) -> None:
    lines, errors = potluck("show", done.folder)
    assert errors == []
    assert lines[0] == f"run {done.manifest.run_id[:12]} demo: log {done.folder / 'log'}"
    text = "\n".join(lines)
    assert re.search(r"^round 0  \d{4}-\d\d-\d\d [\d:]{8}\n  plan +2 full, 1 chain of 2, 0 spares$", text, re.M)
    assert len(re.findall(r"^round \d .* 3 of 3 replicas  loss \d\.\d{3}  [\d.]+ kB$", text, re.M)) == 3
    full = re.findall(r"^  \d full +weight 0\.333  loss +\d\.\d{3}  steps 1 +[\d.]+ kB  norm \S+ +\w{8}$", text, re.M)
    chain = re.findall(r"^  \d chain +weight 0\.333 .* \w{8} > \w{8}$", text, re.M)
    assert (len(full), len(chain)) == (6, 3)


def test_show_as_json_has_one_object_per_round(done: Done, potluck: Potluck) -> None:
    lines, _ = potluck("show", done.folder, "--json")
    rounds = [json.loads(line) for line in lines]
    commits = [r["commit"] for r in rounds]
    assert [c["round"] for c in commits] == [0, 1, 2, 3]
    assert [c["parent"] for c in commits] == [done.manifest.run_id, *(r["digest"] for r in rounds[:-1])]
    for r, decided in zip(rounds, commits, strict=True):
        assert r["votes"].keys() == {decided["leader"]}
        assert all(c["tokens"] > 0 and c["shares"][0]["size"] > 0 for c in decided["contributions"])
        assert len(decided["contributions"]) == (3 if decided["round"] else 0)


def test_who_was_left_out_and_who_diverged_is_shown(copy: Done, potluck: Potluck) -> None:
    key = keyfile.load_or_create(copy.folder / "identity.key")

    def change(round: int, commit: Commit) -> Commit:
        if round != 2:
            return commit
        first, *rest = commit.contributions
        return dataclasses.replace(
            commit,
            contributions=tuple(rest),
            left_out=(LeftOut(replica=first.replica, reason="peer\x1b[2J: gone"),),
            diverged=(Diverged(peer=first.shares[0].peer, shard="block.1"),),
        )

    rewrite(copy.folder, change, key)
    text = "\n".join(potluck("show", copy.folder)[0])
    assert re.search(r"^  0 \w+ .*left out: peer \[2J: gone  \w{8}", text, re.M)
    assert re.search(r"^  diverged +\w{8} in block\.1 after round 1$", text, re.M)
    assert "\x1b" not in text
    (left,) = json.loads(potluck("show", copy.folder, "--json")[0][2])["commit"]["left_out"]
    assert left["reason"] == "peer\x1b[2J: gone", "as it is in the log"


# --- verify


def test_a_good_log_verifies_and_nothing_is_touched(done: Done, potluck: Potluck) -> None:
    before = snapshot(done.folder)
    node = Archive(done.folder, done.manifest)  # a node that runs
    try:
        lines, errors = potluck("verify", done.folder)
    finally:
        node.close()
    assert errors == []
    assert "4 commits, 9 contributions; replayed" in lines[0]
    assert lines[1] == "21 of 21 digests that peers attested are those of the replay"
    assert lines[2] == f"state after round 3: {done.result['state_digest']}"
    assert {k: v for k, v in snapshot(done.folder).items() if "lock" not in k} == {
        k: v for k, v in before.items() if "lock" not in k
    }


def test_the_replay_can_begin_at_a_checkpoint(done: Done, potluck: Potluck, tmp_path: Path) -> None:
    import numpy as np

    from peer.log import replay
    from peer.state.storage import Checkpoint, Storage

    node = Archive(done.folder, done.manifest)
    states = list(replay.replay(done.manifest, node.commits, node.blobs.get))
    node.close()
    storage = Storage(tmp_path / "peer")
    for state, bit in ((states[1], 0), (states[3], 0), (states[2], 1)):
        theta = {s: [a.copy() for a in arrays] for s, arrays in state.theta.items()}
        theta["block.3"][0].view(np.uint32)[0] ^= bit
        storage.save_checkpoint(Checkpoint(state.round, theta, {}), dict.fromkeys(theta, "d"))
        if state.round == 1:
            lines, _ = potluck("verify", done.folder, "--checkpoint", tmp_path / "peer" / "checkpoint-00000001")
            assert "from round 1 on" in lines[0]
            assert lines[2] == f"state after round 3: {done.result['state_digest']}"
        elif state.round == 2:
            lines, _ = potluck("verify", done.folder, "--checkpoint", tmp_path / "peer" / "checkpoint-00000002", code=1)
            assert lines[0].startswith("round 2, block.3: the replay gives state ")
    storage.close()
    late = tmp_path / "peer" / "checkpoint-00000003"
    assert "the log ends at round 3" in potluck("verify", done.folder, "--checkpoint", late, code=2)[1][0]
    assert "cannot be read" in potluck("verify", done.folder, "--checkpoint", tmp_path, code=2)[1][0]


def test_a_flipped_byte_in_the_middle_of_the_log(copy: Done, potluck: Potluck) -> None:
    at, record, _ = commits(copy.folder)[1]
    raw = bytearray((copy.folder / "log").read_bytes())
    raw[logfile.end_of(at, record) - len(record) // 2] ^= 1
    (copy.folder / "log").write_bytes(raw)
    lines, _ = potluck("verify", copy.folder, code=1)
    assert lines[0] == f"round 1: the commit cannot be read: its record at byte {at} is damaged"
    assert "1 commit," in lines[1]
    shown, errors = potluck("show", copy.folder, code=1)
    assert [line.split("  ")[0] for line in shown if line.startswith("round")] == ["round 0"]
    assert f"round 1: the commit cannot be read: its record at byte {at} is damaged" in errors[0]


def test_a_flipped_bit_in_a_payload(copy: Done, potluck: Potluck) -> None:
    path = a_payload(copy.folder, 2, "block.1")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    lines, errors = potluck("verify", copy.folder, code=1)
    assert re.fullmatch(
        rf"round 2, block\.1: payload {path.name[:12]} of \w{{8}}: its bytes are not those that were committed",
        lines[0],
    )
    assert [line for line in lines if line.startswith("round")] == lines[:1]
    assert "1 problem" in errors[0]
    assert path.read_bytes() == bytes(raw), "a verification removes nothing"


def test_a_payload_that_is_gone(copy: Done, potluck: Potluck) -> None:
    a_payload(copy.folder, 1, "head").unlink()
    a_payload(copy.folder, 3, "embed").unlink()
    lines, _ = potluck("verify", copy.folder, code=1)
    assert [line.split(":")[0] for line in lines[:2]] == ["round 1, head", "round 3, embed"]


def test_a_forged_commit(copy: Done, potluck: Potluck) -> None:
    found = commits(copy.folder)
    forged = encoding.encode_record(tiny.record(dataclasses.replace(found[2][2], time=0.0), Identity(b"f" * 32)))
    out = b"".join(framed(forged if round == 2 else raw) for round, (_, raw, _) in enumerate(found))
    (copy.folder / "log").write_bytes(out)
    lines, _ = potluck("verify", copy.folder, code=1)
    assert lines[0].startswith("round 2: the commit has too few votes")
    assert "2 commits" in lines[1]
    shown, errors = potluck("show", copy.folder, code=1)
    assert sum(line.startswith("round") for line in shown) == 2
    assert "round 2: the commit has too few votes" in errors[0]


def test_a_list_of_parts_that_is_gone_or_damaged(copy: Done, potluck: Potluck) -> None:
    share = commits(copy.folder)[2][2].shares[0]
    path = copy.folder / "blobs" / share.root
    raw = path.read_bytes()
    for left, why in ((None, "not in .*"), (raw[:-1] + b"?", "its bytes are not those that were committed")):
        path.unlink() if left is None else path.write_bytes(left)
        lines, errors = potluck("verify", copy.folder, code=1)
        assert re.fullmatch(rf"round 2: list of parts {share.root[:12]} of \w{{8}}: {why}", lines[0])
        assert "1 problem" in errors[0]


def _weight(folder: Path, commit: Commit) -> Commit:
    first, *rest = commit.contributions
    return dataclasses.replace(commit, contributions=(dataclasses.replace(first, tokens=first.tokens * 2), *rest))


def _first_share(commit: Commit, share: Share) -> Commit:
    first, *rest = commit.contributions
    first = dataclasses.replace(first, shares=(share, *first.shares[1:]))
    return dataclasses.replace(commit, contributions=(first, *rest))


def _listed(folder: Path, commit: Commit, change: Callable[[tuple[Part, ...]], tuple[Part, ...]]) -> Commit:
    """Another list of parts for the first share, which lies there as lists do."""
    made = change(parts(folder, commit.shares[0]))
    share = part_lists.share_of(commit.shares[0].peer, made)
    (folder / "blobs" / share.root).write_bytes(part_lists.pack(made))
    return _first_share(commit, share)


def _norm(folder: Path, commit: Commit) -> Commit:
    return _listed(folder, commit, lambda p: (dataclasses.replace(p[0], norm=p[0].norm * 1.01), *p[1:]))


def _fewer(folder: Path, commit: Commit) -> Commit:
    return _listed(folder, commit, lambda p: p[1:])


def _sum(folder: Path, commit: Commit) -> Commit:
    share = commit.shares[0]
    return _first_share(commit, dataclasses.replace(share, size=share.size + 1))


def _elsewhere(folder: Path, commit: Commit) -> Commit:
    return _first_share(commit, dataclasses.replace(commit.shares[0], root="0" * 64))


def _scale(folder: Path, commit: Commit) -> Commit:
    first, *rest = commit.contributions
    return dataclasses.replace(commit, contributions=(dataclasses.replace(first, scale=0.5), *rest))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_weight, "round 2: replica 0: its weight is wrong"),
        (_scale, r"round 2: replica 0 counts with 0\.5 of its update, by the rule with (1|0\.9\d+)$"),
        (_norm, r"round 2, embed: payload \w{12} of \w{8}: its norm is"),
        (_fewer, r"round 2: list of parts \w{12} of \w{8}: it does not cover the planned shards"),
        (_sum, r"round 2: list of parts \w{12} of \w{8}: its size or norm is not that of its parts"),
        (_elsewhere, r"round 2: list of parts 000000000000 of \w{8}: not in "),
        (lambda folder, c: dataclasses.replace(c, run="0" * 64), "round 2: the commit is of another run"),
        (lambda folder, c: dataclasses.replace(c, parent="0" * 64), "round 2: the commit does not follow"),
        (
            lambda folder, c: dataclasses.replace(c, digests={**c.digests, "block.0": "0" * 64}),
            r"round 1, block\.0: the replay gives state \w{12}…, the peers say 000000000000…",
        ),
    ],
)
def test_what_a_dishonest_operator_signs(
    change: Callable[[Path, Commit], Commit], named: str, copy: Done, potluck: Potluck
) -> None:
    key = keyfile.load_or_create(copy.folder / "identity.key")
    rewrite(copy.folder, lambda round, commit: change(copy.folder, commit) if round == 2 else commit, key)
    lines, errors = potluck("verify", copy.folder, code=1)
    assert re.match(named, lines[0])
    assert re.match(r"potluck: log .*: \d+ problems?; ", errors[-1])


@pytest.mark.parametrize("cut", [1, 100, -3])
def test_a_torn_tail_is_a_note(copy: Done, potluck: Potluck, cut: int) -> None:
    at = commits(copy.folder)[-1][0]
    whole = (copy.folder / "log").read_bytes()
    torn = whole[: at + cut] if cut > 0 else whole[:cut]
    (copy.folder / "log").write_bytes(torn)
    for command in ("show", "verify"):
        _, errors = potluck(command, copy.folder)
        said = "there is a record that is not whole: a crash cut it off, or it is being written"
        assert errors == [f"potluck: note: after byte {at} {said}"]
    assert (copy.folder / "log").read_bytes() == torn


# --- bad input


def test_bad_input_is_refused(done: Done, copy: Done, potluck: Potluck, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "log").write_bytes(b"")
    (copy.folder / "manifest.json").unlink()
    for command in ("show", "verify"):
        assert "has no log" in potluck(command, tmp_path / "empty", code=2)[1][0]
        for absent in (tmp_path / "none", "x" * 300):
            assert "neither an address nor a file or folder" in potluck(command, absent, code=2)[1][0]
        assert "not a run id" in potluck(command, "/ip4/127.0.0.1/tcp/1/p2p/x#12", code=2)[1][0]
        assert "is not the manifest of run" in potluck(command, copy.folder, code=2)[1][0]
        assert "no rounds yet" in potluck(command, tmp_path / "new")[1][0]
        for arguments in ((), ("--help",)):
            lines = potluck(command, *arguments, code=0 if arguments else 2)[0]
            assert not arguments or f"Example: potluck log {command} " in " ".join(lines)


# --- over the network


def test_over_hivemind_from_a_node_that_runs_again(done: Done, tmp_path: Path) -> None:
    folder = tmp_path / "bootstrap"
    shutil.copytree(done.folder, folder)
    (tmp_path / "run.toml").write_text(manifests.to_toml(done.manifest))
    here = ("--host", "127.0.0.1", "--port", 0, "--json")
    node = Popen("bootstrap", tmp_path / "run.toml", "--dir", folder, *here, stdout=subprocess.PIPE, text=True)

    def potluck(*arguments: str, code: int = 0) -> list[str]:
        ended = run("log", *arguments, text=True, timeout=swarms.DEADLINE)
        assert ended.returncode == code, ended.stderr
        return ended.stdout.splitlines()

    try:
        event = json.loads(node.stdout.readline())
        assert event["event"] == "listening"
        address = event["address"]
        shown = [json.loads(line) for line in potluck("show", address, "--json")]
        assert [r["commit"]["round"] for r in shown] == [0, 1, 2, 3]
        assert potluck("verify", address)[-1] == f"state after round 3: {done.result['state_digest']}"
        path = a_payload(folder, 2, "block.1")
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        lines = potluck("verify", address, code=1)
        assert lines[0].startswith(f"round 2, block.1: payload {path.name[:12]} of ")
    finally:
        node.terminate()
        node.wait(swarms.DEADLINE)
