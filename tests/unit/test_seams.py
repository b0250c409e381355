"""Tests put parts in where the product takes them: none replaces a module's or class's, none is private."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
REPLACED = {
    # replaces the operating system's clock in a process of its own, since hivemind takes no other
    "faults/wall_clock.py": {"time.time": "time"},
    # goes round a defect of hivemind, in a process that runs hivemind alone, which measures it and nothing of ours
    "benchmarks/averaging.py": {"quantization.Quantization.extract": "hivemind"},
}
"""What a file may replace all the same, and whose it is: never ours."""
OURS = {"protocol", "peer", "bootstrap", "tests"}
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}
"""Members of a namedtuple: the underscore only keeps them from its fields."""
PRIVATE_OF_OTHERS = {
    "os._exit",
    "torch.Tensor._make_wrapper_subclass",
    "torch.utils._python_dispatch",
    "_ATEN._local_scalar_dense",
}
"""Documented, for all its underscore."""

Bound = dict[str, bool]
"""A scope: names, and whether each stands for what was imported or for a class."""


class Reader(ast.NodeVisitor):
    """Walks through a module. `found`: forbidden lines; `origins`: what imported names stand for."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.origins: dict[str, str] = {}
        self._scopes: list[Bound] = [{}]

    def visit_Module(self, node: ast.Module) -> None:
        self._bind(node.body)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = (a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg))
        self._scopes.append(dict.fromkeys(arguments, False))
        if not isinstance(node, ast.Lambda):
            self._bind(node.body)
        self.generic_visit(node)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            package = alias.name.partition(".")[0]
            self.origins[alias.asname or package] = alias.name if alias.asname else package

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            if _private(alias.name):
                self._tell(node, f"imports {alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _private(node.attr) and node.attr not in PUBLIC:
            whole = ast.unparse(node)
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and not whole.startswith("super().") and whole not in PRIVATE_OF_OTHERS:
                self._tell(node, f"touches {whole}")
        if not isinstance(node.ctx, ast.Load) and self._is_part(node.value):
            self._tell(node, f"replaces {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Of the names that a module or a class has, as a mapping."""
        if not isinstance(node.ctx, ast.Load) and ast.unparse(node.value).endswith(("__dict__", "sys.modules")):
            self._tell(node, f"replaces {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = _dotted(node.func)
        if not called.endswith(("attr", "setitem")) and not called.startswith(("mock.", "unittest.mock.", "mocker.")):
            return
        target = ast.unparse(node.args[0]) if node.args else ""
        name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
        if (
            called.endswith((".setattr", ".delattr"))
            or called.startswith(("mock.", "unittest.mock.", "mocker."))
            or (called in ("setattr", "delattr") and self._is_part(node.args[0]))
            or (called.endswith("setitem") and target == "sys.modules")
        ):
            self._tell(node, f"replaces {target}")
        elif called.endswith("attr") and isinstance(name, str) and _private(name) and target not in ("self", "cls"):
            self._tell(node, f"touches {target}.{name}")

    def _tell(self, node: ast.AST, what: str) -> None:
        self.found.append((getattr(node, "lineno", 0), what))

    def _bind(self, body: list[ast.stmt]) -> None:
        """Learns the names that a scope binds, as far as they are not those of the scopes inside."""
        scope = self._scopes[-1]
        outer = [node for statement in body for node in _here(statement)]
        for node in outer:
            match node:
                case ast.Import() | ast.ImportFrom():
                    scope.update({(a.asname or a.name).partition(".")[0]: True for a in node.names})
                case ast.ClassDef(name=name):
                    scope[name] = True
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    scope[name] = False
                case ast.Name(id=name, ctx=ast.Store()):
                    scope[name] = False
        for node in outer:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() | ast.Attribute() as value):
                    scope[name] = self._is_part(value)

    def _is_part(self, node: ast.expr) -> bool:
        """Whether it stands for a module or a class; a module's other members, as a logger, are objects."""
        if isinstance(node, ast.Call):
            return ast.unparse(node.func).endswith(("import_module", "__import__", "type"))
        root, _, path = ast.unparse(node).partition(".")
        if not next((scope[root] for scope in self._scopes[::-1] if root in scope), False):
            return False
        is_class = path.rpartition(".")[2][:1].isupper()
        return not path or is_class or _is_module(f"{self.origins.get(root, root)}.{path}")


def _here(root: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it in their order, without the inside of functions, and of classes."""
    left = [root]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            left += reversed(list(ast.iter_child_nodes(node)))


def _dotted(node: ast.expr) -> str:
    """What `ast.unparse` says of a name or a name's member; else, for it is slow, the members alone."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
    return "()"


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def read(text: str) -> Reader:
    reader = Reader()
    reader.visit(ast.parse(text))
    return reader


def test_no_test_replaces_a_part_or_touches_a_private_member() -> None:
    told = []
    for path in sorted(TESTS.rglob("*.py")):
        file = path.relative_to(TESTS).as_posix()
        excused = {f"replaces {name}" for name in REPLACED.get(file, ())}
        told += [f"{file}:{line} {what}" for line, what in read(path.read_text()).found if what not in excused]
    assert told == []


@pytest.mark.parametrize("file", REPLACED)
def test_what_is_excused_is_not_ours_and_still_there(file: str) -> None:
    reader = read((TESTS / file).read_text())
    for name, package in REPLACED[file].items():
        assert f"replaces {name}" in {what for _, what in reader.found}
        assert reader.origins[name.partition(".")[0]].partition(".")[0] == package
        assert package not in OURS


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("from peer import x\ndef f(monkeypatch): monkeypatch.setattr(x, 'A', 1)", "replaces x"),
        ("from peer import x\nx.A = 1", "replaces x.A"),
        ("from peer import x\nx.A += 1", "replaces x.A"),
        ("from peer import x\ndel x.A", "replaces x.A"),
        ("import peer.net\npeer.net.base.A = 1", "replaces peer.net.base.A"),
        ("from peer.net import p2p as x\nx.X.A = 1", "replaces x.X.A"),
        ("import peer.x as x\ndef f():\n  x.A, b = 1, 2", "replaces x.A"),
        ("def f():\n  from peer.x import X\n  X.go = f", "replaces X.go"),
        ("from peer.x import X\nY = X.Z\nY.go = 1", "replaces Y.go"),
        ("from peer.x import X\nsetattr(X, 'go', 1)", "replaces X"),
        ("import sys\nsys.modules['peer.x'] = 1", "replaces sys.modules['peer.x']"),
        ("from peer import x\nx.__dict__['A'] = 1", "replaces x.__dict__['A']"),
        ("class X: ...\nX.go = 1", "replaces X.go"),
        ("def f(a): type(a).go = 1", "replaces type(a).go"),
        ("from unittest import mock\nmock.patch('peer.x.A')", "replaces 'peer.x.A'"),
        ("def f(a): a._b", "touches a._b"),
        ("class X:\n  def f(self): self.a._b()", "touches self.a._b"),
        ("def f(a): getattr(a, '_b')", "touches a._b"),
        ("from peer.x import _y", "imports _y"),
    ],
)
def test_a_replaced_part_and_a_private_member_are_found(text: str, told: str) -> None:
    assert [what for _, what in read(text).found] == [told]


@pytest.mark.parametrize(
    "text",
    [
        "from peer.x import X\ndef f():\n  x = X()\n  x.a = 1",
        "from peer import x\ndef f(x): x.a = 1",
        "from peer import x\nasync def f():\n  async with g() as x:\n    x.a = 1",
        "class X:\n  def __init__(self): self._a = 1",
        "class X(Y):\n  def f(self): super()._f()",
        "def f(a): return a._replace(b=1)",
        "from peer.net import base\nbase.log.propagate = False",
        "import os\nos._exit(0)",
        "def f(monkeypatch): monkeypatch.setenv('A', 'b')",
        "for _ in range(3): pass",
    ],
)
def test_what_a_test_may_do(text: str) -> None:
    assert read(text).found == []
