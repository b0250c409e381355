"""`potluck export`: uploads to a stand-in for the hub (tests/support/hub.py), and which address a card has."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.cli.export import public_line
from peer.ui.model_card import CARD, Card
from protocol.run.manifest import HintSpec
from protocol.run.short_line import join_line
from tests.support import hub, potluck, tiny
from tests.support.exports import written
from tests.support.invitations import CLOSED, ticket

REPO = "ada/words"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    card = Card(
        manifest=tiny.manifest(),
        round=7,
        state="0" * 64,
        is_checked=True,
        address="",
        licence="mit",
        history=None,
    )
    return written(tmp_path_factory.mktemp("push") / "model", beside=card.files())


def pushed(folder: Path, url: str, repo: str = REPO, **changes: str) -> tuple[int, str, list[str]]:
    """Exit code, output and lines of errors of a process; `changes`: of its environment."""
    given = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    given |= {"HF_ENDPOINT": url, "HF_TOKEN": hub.TOKEN, "HF_HUB_DISABLE_XET": "1", **changes}
    command = [sys.executable, "-m", "peer.cli", "export", str(folder), "--push", repo]
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_the_hub_has_all_files_in_one_commit(folder: Path) -> None:
    with hub.serving() as there:
        code, out, errors = pushed(folder, there.url)
        assert (code, errors) == (0, [])
        assert out == f"on the hub: {there.url}/{REPO}/commit/{'0' * 40}\n"
        assert there.repositories == {REPO: {path.name: path.read_bytes() for path in folder.iterdir()}}
        assert {CARD, "model.safetensors", "model.gguf"} <= set(there.repositories[REPO])


@pytest.mark.parametrize("refused", ["/api/repos/create", f"/api/models/{REPO}/commit/main"])
def test_a_refusal_is_one_line_and_leaves_no_file(folder: Path, refused: str) -> None:
    with hub.serving() as there:
        there.refused = refused
        code, out, (line,) = pushed(folder, there.url)
    assert (code, out) == (1, "")
    assert line.startswith(f"potluck: --push {REPO}: the hub says 403 You don't have the right to write here: hf auth")
    assert line.endswith(f"; {folder} is whole, type potluck export {folder} --push {REPO} to try again")
    assert not any(there.repositories.values())


def test_a_wrong_token_and_no_network_are_one_line_too(folder: Path) -> None:
    with hub.serving() as there:
        code, _, (line,) = pushed(folder, there.url, HF_TOKEN="hf_other")
    assert code == 1
    assert "the hub says 401" in line
    code, _, (line,) = pushed(folder, there.url)  # it is over
    assert code == 1
    assert "the hub was not reached: " in line


def test_what_cannot_be_is_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    code, _, (line,) = pushed(folder, nowhere, HF_TOKEN="", HF_HOME=str(tmp_path))
    assert code == 2
    assert "no token of the hub is here; type hf auth login" in line
    code, _, (line,) = pushed(folder, nowhere, HF_HUB_OFFLINE="1")
    assert code == 2
    assert "HF_HUB_OFFLINE is set" in line
    for name in ("words", "a/b/c", "a b/c", "--/x"):
        done = potluck.run("export", folder, "--push", name, text=True)
        assert done.returncode == 2, name
        (line,) = done.stderr.splitlines()
        assert "write OWNER/NAME" in line


# --- the address in a card

PUBLIC, HOME = (f"/ip4/{host}/tcp/1/p2p/{tiny.OPERATOR.peer_id}" for host in ("8.8.4.4", "192.168.1.5"))


def test_the_line_of_an_open_run_on_the_internet_is_published_without_an_invitation() -> None:
    run = tiny.manifest()
    line, short = f"{PUBLIC}#{run.run_id}", join_line(run.name, PUBLIC, run.run_id)
    assert public_line(run, line) == short
    assert public_line(run, f"{line}#{ticket(run=run.run_id).text()}") == short
    hinted = dataclasses.replace(run, hints=HintSpec(bootstrap=(HOME, PUBLIC)))
    assert public_line(hinted, "my-node") == short


@pytest.mark.parametrize("where", [f"{HOME}#{tiny.manifest().run_id}", "my-node"], ids=["at home", "a folder"])
def test_no_other_address_is(where: str) -> None:
    assert public_line(tiny.manifest(), where) == ""


def test_a_closed_run_has_none() -> None:
    assert public_line(CLOSED, f"{PUBLIC}#{CLOSED.run_id}") == ""
