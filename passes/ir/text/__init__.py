"""The text form of graphs: `printer` describes and writes it, `lexer` splits it into tokens, which `parser` and
`annotations` read."""

from __future__ import annotations

from passes.ir.text.lexer import ALL_DTYPES, DTYPE_NAMES, DTYPES, name_of_function
from passes.ir.text.parser import parse_graph
from passes.ir.text.printer import GAP, format_graph, format_node, format_target, format_type

__all__ = [
    "ALL_DTYPES",
    "DTYPES",
    "DTYPE_NAMES",
    "GAP",
    "format_graph",
    "format_node",
    "format_target",
    "format_type",
    "name_of_function",
    "parse_graph",
]
