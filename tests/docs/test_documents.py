"""The documents agree with the code: files, links, terms, fields of the manifest, commands and pictures."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from peer import events
from peer.cli.main import app
from peer.cli.options import Commands
from peer.ui.run_view import RunView
from peer.ui.screen import render
from protocol.errors import UsageError
from protocol.run import manifest as manifests
from protocol.run.layout import RopeScaling
from protocol.run.manifest import Manifest
from tests.docs import errors, plans
from tests.docs.pictures import DEMO, svg
from tests.support import tiny

Command = TyperCommand | TyperGroup

ROOT = Path(__file__).parents[2]
HISTORY = ROOT / "CHANGELOG.md"
"""Says what was so once."""
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {HISTORY})
PROSE_COLUMNS = 130
"""Documents are written to about 120."""
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
RUN_MODULE = re.compile(r"python -m (tests(?:\.\w+)+)([^`\n]*)")


def text(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def prose(document: str) -> str:
    """A document without its blocks of code."""
    return FENCE.sub("", document)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(command: Command, name: str = "potluck") -> Iterator[tuple[str, Command]]:
    """Every command that can be typed, with its full name."""
    yield name, command
    if isinstance(command, TyperGroup):
        for word, inner in command.commands.items():
            yield from commands(inner, f"{name} {word}")


COMMANDS = dict(commands(typer.main.get_command(app)))


def options(command: Command) -> set[str]:
    return {"--help", *(name for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("--"))}


def test_the_lists_of_commands_cut_no_line() -> None:
    for name, command in COMMANDS.items():
        if isinstance(command, TyperGroup):
            assert isinstance(command, Commands)
            text = command.get_help(typer.Context(command, info_name=name, terminal_width=80))
            shown = text.partition(f"{next(iter(command.sections()))}:")[2].splitlines()
            assert all(len(line) <= 80 and not line.endswith("...") for line in shown)
            assert all(any(line.startswith(f"  {inner} ") for line in shown) for inner in command.commands)


def help_text() -> str:
    return "\n".join(command.get_help(typer.Context(command, info_name=name)) for name, command in COMMANDS.items())


# --- modules, paths and links


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_files_that_are_named_exist(document: Path) -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for code in CODE.findall(prose(text(document))):
        if re.fullmatch(r"(protocol|peer|bootstrap|tests|docs|docker)(/[\w.-]+)+/?", code):
            assert (ROOT / code).exists(), code
        elif re.fullmatch(r"test_\w+\.py", code):
            assert code in tests, code


def test_files_that_the_sources_name_exist() -> None:
    folders = [ROOT / name for name in ("protocol", "peer", "bootstrap", "tests")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(sources) > 100
    for source in [*sources, *(ROOT / "docker").iterdir(), ROOT / "Makefile"]:
        for path in re.findall(
            r"(?<![\w/.])(?:protocol|peer|bootstrap|tests|docs)(?:/[\w-]+)+\.(?:py|md)\b", text(source)
        ):
            assert (ROOT / path).exists(), (named(source), path)


@pytest.mark.parametrize("document", [*DOCUMENTS, HISTORY], ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(prose(text(document))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.is_relative_to(ROOT), target
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def anchors(document: Path) -> set[str]:
    """The headings of a document as links name them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(text(document)), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_lines_of_prose_are_not_wide(document: Path) -> None:
    wide = [
        line
        for line in prose(text(document)).splitlines()
        if len(line) > PROSE_COLUMNS and not line.startswith(("|", "    ", "!["))
    ]
    assert not wide


# --- commands


def typed(document: str) -> Iterator[list[str]]:
    """What a document says to type: commands of ours, and `make`, in blocks of code and within lines."""
    blocks = "\n".join([*FENCE.findall(document), *re.findall(r"^ {4}(.*)$", document, re.MULTILINE)])
    lines = re.findall(r"^(?:[A-Z_]+=\S+ )*((?:potluck|make) .*)$", blocks, re.MULTILINE)
    for found in [*lines, *CODE.findall(document)]:
        words = found.split("#")[0].split()
        if words and words[0] in ("potluck", "make") and len(words) > 1:
            yield words


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_what_is_to_be_typed_can_be_typed(document: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", text("Makefile"), re.MULTILINE))
    for words in typed(text(document)):
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
            continue
        name = max((n for n in COMMANDS if words[: len(n.split())] == n.split()), key=len)
        rest = words[len(name.split()) :]
        if isinstance(COMMANDS[name], TyperGroup) and rest:
            assert rest[0] == "COMMAND" or rest[0].startswith("--"), words
        for option in OPTION.findall(" ".join(words)):
            assert option in options(COMMANDS[name]), words


def test_the_document_of_the_errors_is_todays() -> None:
    assert errors.PATH.read_text(encoding="utf-8") == errors.documentation(), "python -m tests.docs.errors"


def test_what_programs_are_told_of_events_is_so() -> None:
    """docs/guides/agents.md: each event it names is one, with the fields it names."""
    rows = re.findall(r"^\| (`[^|]*`) \|(.*)$", text("docs/guides/agents.md"), re.MULTILINE)[1:]
    known = {kind: {f.name for f in dataclasses.fields(cls)} for kind, cls in events.KINDS.items()}
    assert len(rows) > 10
    for kinds, rest in rows:
        named = CODE.findall(kinds)
        assert set(named) <= set(known), kinds
        fields = {word for word in CODE.findall(rest) if word.islower() and word not in ("direct", "mapped", "private")}
        assert fields <= set().union(*(known[kind] for kind in named)), (kinds, fields)


def test_options_in_prose_are_options_of_some_command() -> None:
    ours = set().union(*(options(command) for command in COMMANDS.values()))
    for path in ("README.md", "docs/glossary.md", "docs/guides/errors.md", "docs/guides/home-links.md"):
        for code in CODE.findall(prose(text(path))):
            if code.startswith("--"):
                assert code.split()[0] in ours, (path, code)


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_commands_of_the_tests_are_todays(document: Path) -> None:
    for module, arguments in RUN_MODULE.findall(text(document)):
        source = ROOT / (module.replace(".", "/") + ".py")
        assert source.exists(), module
        for option in OPTION.findall(arguments):
            assert f'"{option}"' in source.read_text(encoding="utf-8"), (module, option)


# --- words


def defined() -> list[str]:
    """The terms of the glossary in small letters."""
    entries = re.findall(r"^- \*\*([^*]+)\*\*", text("docs/glossary.md"), re.MULTILINE)
    return [re.sub(r" \(.*\)", "", term).lower() for entry in entries for term in entry.split(", ")]


def uses(term: str, document: str) -> bool:
    pattern = re.escape(term.lower()).replace(r"\-", "[- ]").replace(r"\ ", r"[- \n]+")
    return re.search(rf"(?<!\w){pattern}(s|es|ed|ing)?(?!\w)", document.lower()) is not None


def test_the_glossary_explains_each_word_once_and_none_that_nobody_uses() -> None:
    terms = defined()
    assert len(terms) == len(set(terms))
    others = [path for path in DOCUMENTS if path.name != "glossary.md"]
    sources = [path for package in ("protocol", "peer", "bootstrap") for path in (ROOT / package).rglob("*.py")]
    everything = "\n".join([help_text(), *(text(path) for path in (*others, *sources))])
    unused = [term for term in terms if not uses(term, everything)]
    assert not unused


# --- the manifest


def test_the_guide_has_every_field_of_the_manifest_with_its_default() -> None:
    guide = text("docs/guides/manifest.md")
    sections = {"": re.split(r"^### .*run itself.*$", guide, flags=re.MULTILINE)[1].split("\n### ")[0]}
    for section in re.split(r"^### ", guide, flags=re.MULTILINE)[1:]:
        if table := re.match(r"`\[(\w+)\]`", section):
            sections[table[1]] = section
    tables = {f.name: f for f in dataclasses.fields(Manifest) if f.name in sections}
    assert set(sections) == {"", *tables}
    hints = typing.get_type_hints(Manifest)
    assert {name for name, kind in hints.items() if dataclasses.is_dataclass(kind)} == set(tables)
    for name, section in sections.items():
        kind = hints[name] if name else Manifest
        rows = re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\| (.+) \|$", section, re.MULTILINE)
        fields = [f for f in dataclasses.fields(kind) if name or f.name not in tables]
        assert sorted(row[0] for row in rows) == sorted(f.name for f in fields), name
        for field, default, _ in rows:
            assert shown_default(kind, field) == default, (name, field)
    within = re.findall(r"^\| `rope_scaling\.(\w+)` \| (?:`([^`]*)`)? ?\| (.+) \|$", guide, re.MULTILINE)
    assert [row[0] for row in within] == [f.name for f in dataclasses.fields(RopeScaling)]
    for field, default, _ in within:
        assert shown_default(RopeScaling, field) == default, field


def shown_default(kind: type, field: str) -> str:
    """A field's default as a TOML value; nothing where the field has to be given."""
    default = next(f.default for f in dataclasses.fields(kind) if f.name == field)
    if default is dataclasses.MISSING:
        return ""
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        default = list(default)
    return f'"{default}"' if isinstance(default, str) else str(default)


def test_manifests_in_the_documents_can_be_read() -> None:
    found = 0
    for document in DOCUMENTS:
        for block in re.findall(r"^```toml\n(.*?)^```", text(document), re.MULTILINE | re.DOTALL):
            tomllib.loads(block)
            if re.search(r"^name = ", block, re.MULTILINE):
                assert manifests.from_toml(block.encode(), named(document)).operators
                found += 1
                with pytest.raises(UsageError):
                    manifests.from_toml(block.replace("rounds", "round", 1).encode(), named(document))
    assert found


def whole_manifest() -> str:
    """That of the guide."""
    found = re.search(r"^```toml\n(name = .*?)^```", text("docs/guides/manifest.md"), re.MULTILINE | re.DOTALL)
    return found[1]


def with_table(table: str, lines: str) -> bytes:
    """The guide's manifest with these lines in `table`, whose others are gone."""
    parts = re.split(r"^(?=\[)", whole_manifest(), flags=re.MULTILINE)
    return "".join([*(part for part in parts if not part.startswith(f"[{table}]")), f"[{table}]\n{lines}\n"]).encode()


def test_parts_of_manifests_in_the_documents_can_be_read_in_a_whole_one() -> None:
    """Each is a table with what it must have."""
    found = 0
    for document in DOCUMENTS:
        for block in re.findall(r"^```toml\n(.*?)^```", text(document), re.MULTILINE | re.DOTALL):
            if not re.search(r"^name = ", block, re.MULTILINE):
                for part in filter(None, re.split(r"^(?=\[)", block, flags=re.MULTILINE)):
                    table, _, lines = part.removeprefix("[").partition("]\n")
                    made = manifests.from_toml(with_table(table, lines), named(document))
                    assert made.run_id != manifests.from_toml(whole_manifest().encode(), "guide").run_id
                    with pytest.raises(UsageError):
                        manifests.from_toml(with_table(table, f"{lines}\nsurely_no_field = 1"), named(document))
                    found += 1
    assert found


def with_field(table: str, name: str, line: str) -> bytes:
    """The guide's manifest in which `line` gives this field of a table."""
    parts = re.split(r"^(?=\[)", whole_manifest(), flags=re.MULTILINE)
    kept = [re.sub(rf"^{name} = .*\n", "", p, flags=re.M) if p.startswith(f"[{table}]") else p for p in parts]
    if not any(part.startswith(f"[{table}]") for part in parts):
        kept.append(f"[{table}]\n")
    return "".join(p.replace(f"[{table}]\n", f"[{table}]\n{line}\n", 1) for p in kept).encode()


def test_fields_with_values_in_prose_are_taken_by_a_manifest() -> None:
    hints = typing.get_type_hints(Manifest)
    fields = {t: {f.name for f in dataclasses.fields(k)} for t, k in hints.items() if dataclasses.is_dataclass(k)}
    found = set()
    for document in DOCUMENTS:
        for code in CODE.findall(prose(text(document))):
            if given := re.fullmatch(r"(?:(\w+)\.)?(\w+) = (\d[\d.]*|\"[^\"]*\"|true|false)", code):
                tables = [t for t, names in fields.items() if given[2] in names and given[1] in (None, t)]
                assert tables, (named(document), code)
                for table in tables:
                    made = manifests.from_toml(with_field(table, given[2], f"{given[2]} = {given[3]}"), named(document))
                    told = tomllib.loads(f"it = {given[3]}")["it"]
                    assert getattr(getattr(made, table), given[2]) == told, (named(document), code)
                found.add(code)
    assert {"overlap = 1", "topk = 32", 'backward = "sym2"', 'train.optimizer = "muon"'} <= found


def test_the_plans_that_a_guide_shows_are_todays() -> None:
    assert plans.PATH.read_text(encoding="utf-8") == plans.documentation(), "python -m tests.docs.plans"


# --- images and pictures


@pytest.mark.parametrize("path", [*sorted((ROOT / "docker").iterdir()), ROOT / "Makefile"], ids=named)
def test_no_package_host_is_named(path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    assert "://" not in content
    assert not re.search(r"index-url[= ]", content)


def test_the_readme_begins_with_what_it_is_a_picture_and_one_command() -> None:
    readme = text("README.md")
    picture = readme.index("![")
    command = readme.index("    make demo")
    assert readme.index("\n\n") < picture < command
    assert len(readme[:picture]) < 1000, "the picture is seen at once"
    for word in ("sysctl", "tcp_"):
        assert word not in readme


def test_the_picture_stands_by_itself() -> None:
    drawn = svg(render(RunView(tiny.manifest()), *DEMO), *DEMO, "potluck demo")
    for picture in (drawn, *map(text, ("docs/images/demo.svg", "docs/images/monitor.svg", "docs/images/many.svg"))):
        assert picture.startswith("<svg")
        assert "@font-face" not in picture
        assert set(re.findall(r"https?://[^\s\"]+", picture)) <= {
            "http://www.w3.org/2000/svg",
            "https://www.textualize.io",
        }
        assert re.search(r">potluck&#160;(demo|monitor)</text>", picture), "the title bar"
