"""The import arrows of the design, read from the source:

    autoshard -> passes/*.py -> passes/cost, passes/rules, passes/recipes, passes/search -> passes/ir -> errors.py, _torch

Nothing imports up the arrow, no pass imports another one, private parts of torch are imported in passes/_torch
alone, and imports stand at the top of a file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = (  # the first that a module's name starts with is its level; a lower one is further down the arrow
    ("passes._torch", 0),
    ("passes.errors", 0),
    ("passes.hardware", 1),
    ("passes.ir", 1),
    ("passes.cost", 2),
    ("passes.rules", 2),
    ("passes.recipes", 2),
    ("passes.search", 2),
    ("passes", 3),
    ("autoshard", 4),
)
FILES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("autoshard", "passes", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
OURS = pytest.mark.parametrize("file", [file for file in FILES if file.startswith(("autoshard", "passes"))])
ALL = pytest.mark.parametrize("file", FILES)


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what is imported: of `from a.b import c` both `a.b` and `a.b.c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str:
    """`torch._dynamo.config` of an attribute chain that starts with a name; empty otherwise."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def level(module: str) -> int | None:
    """How far up the arrow a module of ours stands; None for any other."""
    return next((n for name, n in LEVELS if module == name or module.startswith(f"{name}.")), None)


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_private(name: str) -> bool:
    """Whether a dotted name leads into a private module of torch; names of ops are data."""
    first, *rest = name.split(".")
    return first == "torch" and rest[:1] != ["ops"] and any(p.startswith("_") and not p.endswith("__") for p in rest)


def passes_in(tree: ast.AST) -> list[str]:
    """Names of the subclasses of Pass that a file defines."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return [node.name for node in classes if "Pass" in map(dotted, node.bases)]


PASS_MODULES = {module_of(file) for file, tree in FILES.items() if file.startswith("passes") and passes_in(tree)}


def violations(file: str, tree: ast.AST) -> list[str]:
    """Imports of `file` that go up the arrow, or from one pass to another."""
    here = module_of(file)
    mine = level(here)
    assert mine is not None
    found = []
    for name in imports(tree):
        theirs = level(name)
        if theirs is not None and theirs > mine:
            found.append(f"{here} imports {name}: up the arrow")
        if here in PASS_MODULES and name in PASS_MODULES:
            found.append(f"{here} imports {name}: a pass imports a pass")
    return found


@OURS
def test_imports_go_down_the_arrow(file: str) -> None:
    assert violations(file, FILES[file]) == []


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return groups of names of which each leads to each other: Tarjan's strongly connected components."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        path.append(name)
        for other in arrows.get(name, ()):
            if other not in number:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == number[name]:
            group = path[path.index(name) :]
            del path[-len(group) :]
            found.extend([sorted(group)] if len(group) > 1 else [])

    for name in arrows:
        if name not in number:
            visit(name)
    return found


def test_a_circle_is_found() -> None:
    assert circles({"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": []}) == [["a", "b", "c"]]


@pytest.mark.parametrize("package", ["autoshard", "passes"])
def test_no_module_imports_what_imports_it(package: str) -> None:
    """Imports for annotations alone (TYPE_CHECKING) count: a circle of names is a circle for a reader."""
    modules = {module_of(file): set(imports(tree)) for file, tree in FILES.items() if file.startswith(f"{package}/")}
    assert circles({name: sorted(names & modules.keys()) for name, names in modules.items()}) == []


@OURS
def test_private_torch_is_imported_in_one_package(file: str) -> None:
    if file.startswith("passes/_torch/"):
        return
    tree = FILES[file]
    used = {*imports(tree), *(dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))}
    assert sorted(filter(is_private, used)) == []


@ALL
def test_imports_stand_at_the_top(file: str) -> None:
    functions = [n for n in ast.walk(FILES[file]) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    inside = [name for function in functions for name in imports(function)]
    assert inside == []


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("passes/ir/a.py", "import passes.rules.rule", ["passes.ir.a imports passes.rules.rule: up the arrow"]),
        ("passes/rules/a.py", "from passes.base import Pass", 2),
        ("passes/base.py", "from autoshard.api import plan", 2),
        ("passes/base.py", "from passes.ir.mesh import Mesh", []),
        ("autoshard/api.py", "from passes.manager import PassManager", []),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, found: list[str] | int) -> None:
    violated = violations(file, ast.parse(source))
    assert violated == found or len(violated) == found


@pytest.mark.parametrize(
    ("name", "private"),
    [("torch._dynamo", True), ("torch.fx._lazy", True), ("torch.ops.aten._to_copy", False), ("torch.fx", False)],
)
def test_private_names_are_told_from_public_ones(name: str, private: bool) -> None:
    assert is_private(name) is private
