"""How files are named, how many stand in a folder, how they begin, and where passes are composed."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePath

from tests.laws.sources import PASS_CLASSES, PRODUCT, ROOT, TESTS, TREES

CODE_FILES = 20  # of a folder, at most
CLASS_LINES = 110  # of code, at most: without blank lines and docstrings, which say how to use the class
SAME_JOB = {"__init__.py"}  # names that several folders share: the same job for each
NO_VERB = {"What", "Which", "Whether", "Of", "How", "Where", "That", "For", "With", "As", "From"}
NOUNS = {"A", "An", "The", "All", "Each", "Every", "One", "Two", "Three", "Some", "Most", "No", "Per", "On", "In", "Its"}


def test_a_folder_holds_few_files() -> None:
    """`passes/` is the exception: it is the list of passes."""
    count = Counter(str(PurePath(file).parent) for file in PRODUCT)
    assert {folder: n for folder, n in count.items() if n > CODE_FILES and folder != "passes"} == {}


def test_no_two_files_share_a_name() -> None:
    named = defaultdict(list)
    for file in PRODUCT:
        named[PurePath(file).name].append(file)
    assert {name: files for name, files in named.items() if len(files) > 1 and name not in SAME_JOB} == {}


def test_every_file_says_what_it_is() -> None:
    assert [file for file, tree in PRODUCT.items() if not ast.get_docstring(tree)] == []


def test_docstrings_start_with_a_verb() -> None:
    """A docstring that starts with one of these words describes, and does not say what is done.

    Classes, attributes and tests may be described by a noun.
    """
    found = []
    for file, tree in {**TREES, **TESTS}.items():
        for name, text in documented(tree):
            if text.split(" ")[0] in NO_VERB:
                found.append(f"{file} {name}: {text[:60]}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("test_"):
                text = ast.get_docstring(node) or "Return"
                if text.split(" ")[0] in NOUNS or not text[0].isupper():
                    found.append(f"{file} {node.name}: {text[:60]}")
    assert found == []


def documented(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield functions, classes and attributes that have a docstring, with it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, ast.get_docstring(node) or ""
        body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
        for attribute, text in pairwise(body):
            match attribute, text:
                case (ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(value)))):
                    yield ast.unparse(attribute).partition(" ")[0].rstrip(":"), value


def code_lines(tree: ast.ClassDef, source: str) -> int:
    """Return how many lines of a class hold code or comments."""
    lines = set(range(tree.lineno, tree.end_lineno + 1)) if tree.end_lineno is not None else set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.end_lineno is not None:
            lines -= {*range(node.lineno, node.end_lineno + 1)}
    texts = source.splitlines()
    return sum(bool(texts[line - 1].strip()) for line in lines)


def test_a_class_is_one_idea() -> None:
    """A longer one holds a second: a value, or functions."""
    classes = [
        (f"{file} {node.name}", code_lines(node, (ROOT / file).read_text(encoding="utf-8")))
        for file, tree in PRODUCT.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    assert [(name, lines) for name, lines in classes if lines > CLASS_LINES] == []


def test_lines_of_code_are_counted() -> None:
    source = 'class A:\n    """One\n    two."""\n\n    x: int = 1\n    """Three."""\n'
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    assert code_lines(tree, source) == 2


def composed(tree: ast.AST) -> list[str]:
    """Return the names of passes that are put into a tuple or list of passes, at least two of them."""
    groups = [node.elts for node in ast.walk(tree) if isinstance(node, ast.Tuple | ast.List)]
    named = [[_called(element) for element in group] for group in groups]
    return [name for names in named if len(PASS_CLASSES & {*names}) > 1 for name in names if name in PASS_CLASSES]


def _called(element: ast.expr) -> str:
    return element.func.id if isinstance(element, ast.Call) and isinstance(element.func, ast.Name) else ""


def test_passes_are_composed_in_one_file() -> None:
    found = {file: composed(tree) for file, tree in PRODUCT.items()}
    assert [file for file, names in found.items() if names] == ["autoshard/phases.py"]


def test_passes_that_are_composed_are_found() -> None:
    assert composed(ast.parse("order = (Normalize(), Seed(x), Localize())")) == ["Normalize", "Seed", "Localize"]
    assert composed(ast.parse("one = (Normalize(),)")) == []


def test_docstrings_of_attributes_are_found() -> None:
    source = 'LIMIT = 1\n"""Bytes."""\nclass A:\n    """One."""\n    x: int = 2\n    """Whether."""\n'
    assert [*documented(ast.parse(source))] == [("LIMIT", "Bytes."), ("A", "One."), ("x", "Whether.")]
