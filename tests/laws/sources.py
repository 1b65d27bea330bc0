"""The project's files as syntax trees, and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("autoshard", "passes", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TESTS = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "tests").rglob("*.py"))
}
PRODUCT = {file: tree for file, tree in TREES.items() if file.startswith(("autoshard/", "passes/"))}


def module_of(file: str) -> str:
    """Return the dotted name of a file's module."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield dotted names of what is imported: of `from a.b import c` both `a.b` and `a.b.c`. TYPE_CHECKING counts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str:
    """Return `torch._dynamo.config` of an attribute chain that starts with a name, and nothing of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def is_pass(node: ast.AST) -> bool:
    """Return whether a class is a compiler pass."""
    return isinstance(node, ast.ClassDef) and "Pass" in map(dotted, node.bases)


PASS_MODULES = {
    module_of(file) for file, tree in PRODUCT.items() if file.startswith("passes/") and any(map(is_pass, ast.walk(tree)))
}
PASS_CLASSES = {
    node.name
    for file, tree in PRODUCT.items()
    if file.startswith("passes/")
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef) and is_pass(node)
}
