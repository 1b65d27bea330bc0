"""The import arrows of the design, read from the source. A test is a law; it names every file that breaks it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import networkx
import pytest

from tests.laws.sources import PASS_MODULES, PRODUCT, TREES, dotted, imports, module_of

LEVELS = (  # the first that a module's name starts with is its level; a module imports none of a higher level
    ("passes._torch", 0),
    ("passes.errors", 0),
    ("passes.hardware", 1),
    ("passes.ir", 2),
    ("passes.rules", 3),
    ("passes.cost", 3),
    ("passes.recipes", 3),
    ("passes.search", 4),
    ("passes", 5),
    ("autoshard", 6),
)


def level(module: str) -> int | None:
    """Return how far up the arrow a module of ours stands; None for any other."""
    return next((n for name, n in LEVELS if module == name or module.startswith(f"{name}.")), None)


def violations(file: str, tree: ast.AST) -> Iterator[str]:
    """Yield imports of `file` that go up the arrow, or from one pass to another."""
    here = module_of(file)
    mine = level(here)
    assert mine is not None
    for name in imports(tree):
        theirs = level(name)
        if theirs is not None and theirs > mine:
            yield f"{here} imports {name}: up the arrow"
        if here in PASS_MODULES and name in PASS_MODULES:
            yield f"{here} imports {name}: a pass imports a pass"


def private_names(tree: ast.AST) -> list[str]:
    """Return the private parts of torch that a file imports or reads."""
    used = {*imports(tree), *(dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))}
    return sorted(filter(is_private, used))


def is_private(name: str) -> bool:
    """Return whether a dotted name leads into a private module of torch; names of ops are data."""
    first, *rest = name.split(".")
    return first == "torch" and rest[:1] != ["ops"] and any(p.startswith("_") and not p.endswith("__") for p in rest)


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Return groups of names of which each leads to each other."""
    graph = networkx.DiGraph([(name, other) for name, others in arrows.items() for other in others])
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def test_imports_go_down_the_arrow_and_no_pass_imports_a_pass() -> None:
    assert [found for file, tree in PRODUCT.items() for found in violations(file, tree)] == []


def test_no_module_imports_what_imports_it() -> None:
    modules = {module_of(file): set(imports(tree)) for file, tree in PRODUCT.items()}
    assert circles({name: names & modules.keys() - {name} for name, names in modules.items()}) == []


def test_no_folder_imports_what_imports_it() -> None:
    """Read `autoshard/` from config and capture to plans, compile, planner, inspection, runtime and api."""
    folders: dict[str, set[str]] = {}
    for file, tree in PRODUCT.items():
        here = ".".join(module_of(file).split(".")[:2])
        there = {".".join(name.split(".")[:2]) for name in imports(tree) if name.startswith("autoshard.")}
        if here.startswith("autoshard."):
            folders[here] = folders.get(here, set()) | there - {here}
    assert circles(folders) == []


def test_private_torch_is_imported_in_one_package() -> None:
    used = {file: private_names(tree) for file, tree in PRODUCT.items() if not file.startswith("passes/_torch/")}
    assert {file: names for file, names in used.items() if names} == {}


def test_imports_stand_at_the_top() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    functions = [(file, node) for file, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, kinds)]
    assert [(file, name) for file, function in functions for name in imports(function)] == []


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("passes/ir/a.py", "import passes.rules.rule", ["passes.ir.a imports passes.rules.rule: up the arrow"]),
        ("passes/seed.py", "import passes.localize", ["passes.seed imports passes.localize: a pass imports a pass"]),
        ("passes/base.py", "import autoshard.api", ["passes.base imports autoshard.api: up the arrow"]),
        ("passes/base.py", "from passes.ir.mesh import Mesh", []),
        ("autoshard/api.py", "from passes.manager import PassManager", []),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, found: list[str]) -> None:
    assert list(violations(file, ast.parse(source))) == found


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch.fx import _lazy", ["torch.fx._lazy"]),
        ("torch.ops.aten._to_copy", []),
        ("import torch.fx", []),
    ],
)
def test_private_names_are_told_from_public_ones(source: str, private: list[str]) -> None:
    assert private_names(ast.parse(source)) == private
