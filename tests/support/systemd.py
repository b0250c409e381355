"""Units as systemd reads them (systemd.unit, systemd.service, systemd.syntax), and stand-ins of its programs."""

from __future__ import annotations

import re
from pathlib import Path

PROGRAM = """\
#!/bin/sh
echo "$(basename "$0") $*" >> {calls}
case "$*" in
    *show*) printf 'ActiveState=active\\nSubState=running\\nNRestarts=3\\nActiveEnterTimestamp=today\\n' ;;
esac
"""


def settings(unit: str) -> dict[str, str]:
    """Of all sections; none is there twice in ours."""
    return dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)


def value(text: str) -> str:
    """A setting that takes the rest of its line."""
    assert not re.search(r"(?<!%)(%%)*%(?!%)", text), "a specifier"
    return text.replace("%%", "%")


def command(text: str) -> list[str]:
    """The words that an ExecStart line runs."""
    words: list[str] = []
    at = 0
    while at < len(text):
        assert text[at] == '"', "ours are all in quotes"
        at += 1
        word = bytearray()
        while text[at] != '"':
            if text[at] != "\\":
                word += text[at].encode()
                at += 1
            elif text[at + 1] == "x":
                word.append(int(text[at + 2 : at + 4], 16))
                at += 4
            else:
                assert text[at + 1] in '"\\', "another escape"
                word += text[at + 1].encode()
                at += 2
        words.append(value(word.decode()))
        assert text[at + 1 : at + 2] in ("", " ")
        at += 2
    assert words[0].startswith(":/"), "$ would mean something, or the program has no absolute path"
    return [words[0][1:], *words[1:]]


def programs(folder: Path, *names: str) -> Path:
    """A folder for PATH with stand-ins that note how they were called, in the file that is given back."""
    folder.mkdir()
    calls = folder / "calls"
    for name in names:
        (folder / name).write_text(PROGRAM.format(calls=calls))
        (folder / name).chmod(0o755)
    return calls
