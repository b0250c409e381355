"""docs/trust.md says what each role can and cannot do, and every sentence names what shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRUST = ROOT / "docs" / "trust.md"
ROLES = ("Anonymous", "A volunteer", "A chain member", "An operator's node", "The leader", "A majority")
TEST = re.compile(r"`(tests/[\w/]+\.py)`")
RESULT = re.compile(r"\]\((results/[\w-]+\.md)\)")


def bullets(role: str) -> Iterator[str]:
    """What is said of a role, each on one line."""
    text = TRUST.read_text().split(f"\n## {role}\n")[1].split("\n## ")[0]
    for said in re.split(r"\n(?=- )", text):
        if said.startswith("- "):
            yield " ".join(said.split("\n\n")[0].split())


def test_every_sentence_about_a_role_names_a_test_or_a_measurement_that_is_there() -> None:
    for role in ROLES:
        said = list(bullets(role))
        assert len(said) >= 3, role
        for one in said:
            assert TEST.search(one) or RESULT.search(one), f"{role}: {one}"


def test_what_is_named_is_there() -> None:
    text = TRUST.read_text()
    for name in {*TEST.findall(text), *(f"docs/{name}" for name in RESULT.findall(text))}:
        assert (ROOT / name).is_file(), name


def test_every_file_of_attacks_is_named() -> None:
    """What is tried against real nodes and peers is said to those who have to trust it."""
    named = set(TEST.findall(TRUST.read_text()))
    assert {f"tests/hostile/{path.name}" for path in (ROOT / "tests" / "hostile").glob("test_*.py")} <= named
