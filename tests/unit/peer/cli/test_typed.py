"""What is printed for typing means to a shell what was meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peer.cli import main
from peer.ui.text import typed
from tests.support.texts import write_corpus

LINE = "/ip4/10.0.0.1/tcp/31337/p2p/12D3KooWA8Ff4dcwKUDXLTqC4oRBkrPT2RMPdSCagaEcGwmWHmNY#8a2a7cac704ece1a"
WORDS = st.text(
    st.characters(exclude_characters="\0", codec="utf-8") | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    max_size=12,
)
"""What names of files may have: characters, and bytes that are none, as os.fsdecode has them."""
ARGUMENTS = [
    sys.executable,
    "-c",
    "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))",
]


def by_shell(command: str) -> list[bytes]:
    """The words that a shell makes of it."""
    done = subprocess.run(["bash", "-c", f'"$@" {command}', "bash", *ARGUMENTS], capture_output=True, check=True)
    return done.stdout.split(b"\0")


@settings(max_examples=5)
@given(st.lists(WORDS, min_size=1, max_size=8))
@example(
    [
        "a b",
        "it's",
        "$HOME",
        "*",
        "~",
        "#x",
        "a;b",
        "ü ö",
        "tab\there",
        "line\nend",
        "\udcff\udc80",
        "back\\slash'\x01",
        LINE,
        "",
    ]
)
@example(["!", "-x"])
def test_a_shell_takes_every_word_as_it_is(words: list[str]) -> None:
    assert by_shell(typed(*words)) == [os.fsencode(word) for word in words]


def test_a_path_is_no_option_and_an_address_is_as_readable_as_it_was() -> None:
    assert typed("potluck", "join", LINE) == f"potluck join {LINE}"
    assert typed("potluck", "bootstrap", Path("-x/run.toml")) == "potluck bootstrap ./-x/run.toml"


@pytest.mark.parametrize("name", ["it's $HOME;b \u00fc", "-x"])
def test_the_last_line_of_init_can_be_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("the corpus"), 100, 64)
    with pytest.raises(SystemExit) as end:
        main.main(["init", "--corpus", "the corpus", "--rounds", "10", "--", name])
    assert end.value.code == 0
    command, *words = by_shell(capsys.readouterr().out.splitlines()[-1])
    assert command == b"potluck"
    manifest, folder = words[words.index(b"bootstrap") + 1], words[words.index(b"--dir") + 1]
    assert Path(os.fsdecode(manifest)).is_file()
    assert (Path(os.fsdecode(folder)) / "identity.key").is_file()
    assert words[words.index(b"--corpus") + 1] == b"the corpus"
