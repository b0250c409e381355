"""The order of the floors (.importlinter) and the sizes of what stands on them.

Every contract is tried: a copy of the packages gets one line too many, and the contract must find it. An import by
name, such as `import_module("peer.cli.main")`, is an import: `lay_open` writes it out in the copy, so that the same
contracts judge it.
"""

from __future__ import annotations

import ast
import configparser
import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "peer", "bootstrap")
CONTRACTS = {
    name.rpartition(":")[2]
    for parser in [configparser.ConfigParser()]
    if parser.read(ROOT / ".importlinter")
    for name in parser.sections()
    if name.startswith("importlinter:contract:")
}
MOST_LINES = 800
MOST_FUNCTION_LINES = 80
MOST_PARAMETERS = 8
REASON = "Long because"
"""How the reason begins, in the docstring of what is longer, or takes more, than that."""

PLANTED = [
    ("peer", "peer/ui/text.py", "import peer.node.peer"),
    ("peer", "peer/net/base.py", "import peer.state.storage"),
    ("peer", "peer/demo/recipe.py", "import peer.cli.join"),
    ("protocol", "protocol/run/manifest.py", "import protocol.planning.planner"),
    ("protocol", "protocol/wire/framing.py", "import protocol.codec.sparse"),
    ("core", "protocol/errors.py", "import peer.events"),
    ("bootstrap", "bootstrap/node.py", "import peer.node.sessions"),
    ("siblings", "peer/node/peer.py", "import bootstrap.archive"),
    ("circles", "protocol/wire/framing.py", "import protocol.wire.session"),
    ("circles", "peer/net/base.py", "import peer.net.memory"),
    ("pure", "protocol/round/member.py", "import time"),
    ("pure", "protocol/wire/logfile.py", "from pathlib import Path"),
    ("hivemind", "peer/net/memory.py", "from hivemind.p2p import P2P"),
    ("torch", "peer/net/uplink.py", "import torch"),
    ("torchless", "peer/state/recovery.py", "import peer.training.model"),
    ("datasets", "peer/training/trainer.py", "import datasets"),
]


def sources(root: Path = ROOT) -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


@functools.cache
def nodes() -> dict[Path, list[ast.AST]]:
    """What each of our modules is made of, the module itself first."""
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in sources()}


def module_of(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def named(tree: ast.AST) -> Iterator[ast.Constant]:
    """Every string that is not a docstring."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node


def lay_open(root: Path) -> None:
    """Adds an import statement for each of our modules that a module names in a string."""
    modules = {module_of(path, root) for path in sources(root)}
    for path in sources(root):
        text = path.read_text()
        found = {node.value for node in named(ast.parse(text))} & modules - {"protocol", "peer", "bootstrap"}
        if found:
            path.write_text(text + "".join(f"\nimport {name}" for name in sorted(found)))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=lambda _, names: {"__pycache__"} & set(names))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def lint(root: Path, *contracts: str) -> tuple[int, str]:
    """Exit code and output of import-linter on the packages in `root`."""
    chosen = [word for name in contracts for word in ("--contract", name)]
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; c()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache", *chosen], cwd=root, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_every_contract_is_tried() -> None:
    assert {contract for contract, _, _ in PLANTED} == CONTRACTS


@pytest.mark.parametrize(("contract", "file", "line"), PLANTED, ids=[f"{c}-{f}" for c, f, _ in PLANTED])
def test_a_planted_import_is_found(contract: str, file: str, line: str, copy: Path) -> None:
    with open(copy / file, "a") as source:
        source.write(f"\n{line}\n")
    code, output = lint(copy, contract)
    assert code == 1, output
    assert "1 broken" in output
    assert module_of(copy / file, copy).rpartition(".")[0] in output, "the wing is named"


def test_what_is_imported_by_name_obeys_the_contracts(copy: Path) -> None:
    lay_open(copy)
    code, output = lint(copy)
    assert code == 0, output


def test_an_import_upwards_by_name_is_found(copy: Path) -> None:
    with open(copy / "peer/demo/swarm.py", "a") as source:
        source.write('\n\ndef hidden() -> object:\n    return __import__("peer.cli.main")\n')
    lay_open(copy)
    code, output = lint(copy, "peer")
    assert code == 1, output
    assert "peer.demo.swarm -> peer.cli.main" in output


def test_what_is_imported_by_name_is_named_where_it_is_imported() -> None:
    """Otherwise no contract could judge it."""
    for path, found in nodes().items():
        for node in found:
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                assert node.args, path
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno} imports what it computes"


def test_only_the_configuration_and_the_events_stand_loose() -> None:
    assert {p.name for p in (ROOT / "peer").glob("*.py")} == {"__init__.py", "config.py", "events.py"}
    assert {p.name for p in (ROOT / "protocol").glob("*.py")} == {"__init__.py", "errors.py", "identity.py"}


def test_every_module_says_what_it_is_for() -> None:
    assert [str(p.relative_to(ROOT)) for p, (module, *_) in nodes().items() if not ast.get_docstring(module)] == []


def long_things(text: str) -> list[str]:
    """What in a module is too long without a reason."""
    tree = ast.parse(text)
    found = []
    if len(text.splitlines()) > MOST_LINES and not excused(tree):
        found.append(f"{len(text.splitlines())} lines")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not excused(node):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([a for a in arguments if a.arg not in ("self", "cls")])
            if lines > MOST_FUNCTION_LINES or count > MOST_PARAMETERS:
                found.append(f"{node.name} has {lines} lines and {count} parameters")
    return found


def excused(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(line.strip().startswith(REASON) for line in (ast.get_docstring(node) or "").splitlines())


def test_nothing_is_long_without_a_reason() -> None:
    found = {str(p.relative_to(ROOT)): long_things(p.read_text()) for p in sources()}
    assert {path: what for path, what in found.items() if what} == {}


def test_what_is_too_long_is_found() -> None:
    body = "\n".join(f"    x{i} = {i}" for i in range(81))
    assert long_things(f"def f():\n{body}\n") == ["f has 82 lines and 0 parameters"]
    assert long_things(f'def f():\n    """F.\n\n    {REASON} it counts.\n    """\n{body}\n') == []
    assert long_things("class A:\n    def f(self, a, b, c, d, e, *, f, g, h): ...\n") == []
    assert long_things("async def f(a, b, c, d, e, *, f, g, h, i): ...\n") == ["f has 1 lines and 9 parameters"]
    assert long_things("x = 1\n" * 801) == ["801 lines"]


def test_no_module_uses_what_another_keeps_private() -> None:
    found = [
        f"{module_of(path)}:{node.lineno}"
        for path, of_module in nodes().items()
        for node in of_module
        if isinstance(node, ast.ImportFrom) and any(alias.name.startswith("_") for alias in node.names)
    ]
    assert found == []
