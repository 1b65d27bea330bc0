"""Every pass says what it does with a graph before and a graph after, and does it."""

from __future__ import annotations

import pytest

from passes.base import Pass
from passes.ir.text import format_graph, parse_graph
from tests.passes.docs import example_of, pass_classes, run_example

PASSES = pytest.mark.parametrize("kind", pass_classes(), ids=lambda kind: kind.name)


@PASSES
def test_docstring_ends_in_before_and_after(kind: type[Pass]) -> None:
    example = example_of(kind)
    assert example.before and example.after, f"{kind.__name__}: its docstring needs Before: and After: graphs"


@PASSES
def test_before_and_after_are_written_as_a_dump_is(kind: type[Pass]) -> None:
    example = example_of(kind)
    for text in (example.before, example.after):
        assert text == format_graph(*parse_graph(text))


@PASSES
def test_pass_turns_before_into_after(kind: type[Pass]) -> None:
    example = example_of(kind)
    assert run_example(example) == example.after


@PASSES
def test_pass_is_named_as_its_file(kind: type[Pass]) -> None:
    assert kind.__module__ == f"passes.{kind.name}"
