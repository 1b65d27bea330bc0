"""The lexer of graph text: its words, tokens and lines, and errors that name the line."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from passes.errors import GraphTextError, UserError
from passes.ir.collectives import KINDS
from passes.ir.graph import reshard

FUNCTIONS: Mapping[str, Callable[..., Any]] = {"getitem": operator.getitem, "reshard": reshard}


def function_named(name: str) -> Callable[..., Any] | None:
    """Return the function (not an op) that is written as `name`: `getitem`, `reshard`, or a step of a reshard."""
    return KINDS[name].step if name in KINDS else FUNCTIONS.get(name)


def name_of_function(function: object) -> str | None:
    """Return how a function that is not an op is written, None if graphs do not call it."""
    names = (*FUNCTIONS, *KINDS)
    return next((name for name in names if function_named(name) is function), None)


DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "b8": torch.bool,
    "c128": torch.complex128,
    "c64": torch.complex64,
    "c32": torch.complex32,
    "f8e4m3fn": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "f8e4m3fnuz": torch.float8_e4m3fnuz,
    "f8e5m2fnuz": torch.float8_e5m2fnuz,
    "f8e8m0fnu": torch.float8_e8m0fnu,
}
# Dtypes without a short name have torch's: those of few bits, and those of later releases.
_OTHERS = (one for name, one in vars(torch).items() if isinstance(one, torch.dtype) and str(one) == f"torch.{name}")
ALL_DTYPES = {str(one).removeprefix("torch."): one for one in _OTHERS if one not in DTYPES.values()} | dict(DTYPES)
DTYPE_NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}

DEVICES = ("cpu", "cuda", "xpu", "mps")

SYMBOLS: Mapping[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "inf": float("inf"),
    "nan": float("nan"),
    **DTYPES,
    **{
        str(symbol): symbol
        for symbol in (
            torch.strided,
            torch.contiguous_format,
            torch.preserve_format,
            torch.channels_last,
            torch.channels_last_3d,
        )
    },
}

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<comment>\#.*) | (?P<node>%\w+) | (?P<string>"(?:\\.|[^"\\])*") | (?P<layout>\{[^}]*\}) |
    (?P<number>-?(?:inf|\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?![\w.])) | (?P<word>[A-Za-z_][\w.]*) | (?P<mark>[][()<>,:=@/~])
    )""",
    re.VERBOSE,
)


class Lines:
    """The nonempty lines of a text; a `return` that ends in a comma continues on the next line."""

    def __init__(self, text: str) -> None:
        numbered = enumerate((line.strip() for line in text.splitlines()), 1)
        self.rest = iter([(number, line) for number, line in numbered if line and not line.startswith("#")])
        self.number, self.text = 0, ""

    def next(self) -> bool:
        """Go on to the next line; False at the end."""
        number, text = next(self.rest, (self.number + 1, ""))
        while text.startswith("return") and text.endswith(","):
            text = f"{text} {next(self.rest, (0, ''))[1]}".rstrip()
        self.number, self.text = number, text
        return bool(text)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Add this line to a user's error."""
        try:
            yield
        except UserError as error:
            self.fail(str(error))

    def fail(self, what: str) -> NoReturn:
        raise GraphTextError(f"line {self.number}: {what}" + (f"\n    {self.text}" if self.text else ""))


class Tokens:
    """The tokens of the current line, and its comment."""

    def __init__(self, lines: Lines) -> None:
        self.lines, self.comment, self.at = lines, "", 0
        self.tokens: list[tuple[str, str]] = []
        end = 0
        while end < len(lines.text):
            match = _TOKEN.match(lines.text, end)
            if match is None or match.lastgroup is None:
                lines.fail(f"cannot read {lines.text[end:].strip()!r}")
            end = match.end()
            if match.lastgroup == "comment":
                self.comment = match["comment"].removeprefix("#").strip()
            else:
                self.tokens.append((match.lastgroup, match[match.lastgroup]))

    def kind(self) -> str:
        """Return `node`, `string`, `layout`, `number`, `word`, `mark`, or `end` after the last token."""
        return self.tokens[self.at][0] if self.at < len(self.tokens) else "end"

    def peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.tokens[at][1] if at < len(self.tokens) else ""

    def take(self) -> str:
        text = self.peek()
        self.at += 1
        return text

    def accept(self, text: str) -> bool:
        """Take the next token if it is `text`; return whether it was."""
        found = self.peek() == text
        self.at += found
        return found

    def expect(self, *texts: str) -> str:
        if self.peek() not in texts:
            self.fail(" or ".join(map(repr, texts)))
        return self.take()

    def expect_kind(self, kind: str, what: str) -> str:
        if self.kind() != kind:
            self.fail(what)
        return self.take()

    def expect_end(self) -> None:
        if self.kind() != "end":
            self.fail("the end of the line")

    def integer(self, what: str) -> int:
        if not self.peek().isdigit():
            self.fail(what)
        return int(self.take())

    def string(self, what: str) -> str:
        text = self.expect_kind("string", what)
        try:
            return str(json.loads(text))
        except json.JSONDecodeError as error:
            self.lines.fail(f"cannot read the string {text}: {error.msg}")

    def items(self, end: str) -> Iterator[None]:
        """Yield once per item, separated by commas, up to `end`, which is taken."""
        while not self.accept(end):
            yield
            if not self.accept(","):
                self.expect(end)
                return

    def fail(self, expected: str) -> NoReturn:
        self.lines.fail(f"expected {expected}, got {self.peek() or 'the end of the line'!r}")
