"""What a command imports before it does its work: torch alone takes seconds of processor."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from peer.cli.main import COMMANDS, main

HEAVY = ("torch", "scipy", "pandas", "pyarrow", "datasets", "transformers", "tokenizers", "grpc", "huggingface_hub")
NETWORK = ("numpy", "hivemind", "rich", "cryptography", "msgpack", "peer.net.base", "peer.events", "protocol.wire")


def loaded(code: str) -> set[str]:
    """The modules that another process has after `code`."""
    code = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("typed", [["--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy(typed: list[str]) -> None:
    modules = loaded(f"from peer.cli.main import main; main({typed})")
    assert "peer.cli.main" in modules
    assert not modules & {*HEAVY, *NETWORK}


def test_a_shell_completes_commands_and_their_options() -> None:
    def completed(*words: str) -> list[str]:
        typed = {"_POTLUCK_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        code = "from peer.cli.main import main; main([])"
        run = [sys.executable, "-c", code]
        return subprocess.run(run, capture_output=True, text=True, env=os.environ | typed).stdout.split()

    assert completed("potluck", "e") == ["eval", "export"]
    assert completed("potluck", "join", "--mem") == ["--memory"]
    assert completed("potluck", "run", "b") == ["ban"]


def test_the_names_of_commands_are_completed_without_their_imports() -> None:
    typed = "import os; os.environ.update(_POTLUCK_COMPLETE='complete_bash', COMP_WORDS='potluck ', COMP_CWORD='1')"
    modules = loaded(f"{typed}; from peer.cli.main import main; main([])")
    assert "peer.cli.main" in modules
    assert not modules & {*HEAVY, *NETWORK, "peer.cli.join"}


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("peer.cli.watch, peer.net.p2p", ("numpy",)),
        ("peer.cli.join, peer.net.p2p, peer.net.relay, peer.state.storage", ()),
    ],
    ids=["watching", "joining"],
)
def test_the_network_is_reached_before_torch_is_imported(modules: str, without: tuple[str, ...]) -> None:
    """Of hivemind's libraries alone a process would have about 240 MB; who only watches does without numpy, too."""
    found = loaded(f"import {modules}")
    assert "hivemind" in found
    assert not found & {*HEAVY, *without}


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"potluck {version('potluck')}\n"


def test_a_mistyped_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["jion"])
    assert ended.value.code == 2
    assert "Did you mean 'join'?" in capsys.readouterr().err


def test_an_example_begins_with_its_command() -> None:
    for name, late in COMMANDS.items():
        assert late.example is None or late.example.startswith(f"potluck {name} ")
