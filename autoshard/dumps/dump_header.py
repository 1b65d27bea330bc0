"""The passes of a pipeline and how each was set, as comments before a dumped graph: so that it runs again as it ran."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from autoshard.config.axis_recipes import recipes_of
from autoshard.phases import Phases, default_passes
from autoshard.plans.codec import decode, encode
from passes.base import Pass
from passes.cast_parameters import CastParameters
from passes.errors import UserError
from passes.ir.mesh import Mesh
from passes.seed import Seed

UnknownOps = Literal["replicate", "error"]
PLACING = ("propagate", "solve")  # either has the same place
_KINDS = {one.name: type(one) for one in default_passes()}
_LINE = re.compile(r"# pass (\w+)(?: (\{.*\}))?")


@dataclass(frozen=True)
class Header:
    """Passes by name. None is one whose settings no text holds: a search, a pass of the user's own."""

    passes: tuple[tuple[str, Pass | None], ...]
    unknown_ops: UnknownOps = "replicate"

    @staticmethod
    def of(passes: Sequence[Pass], unknown_ops: UnknownOps) -> Header:
        return Header(tuple((one.name, one if type(one) is _KINDS.get(one.name) else None) for one in passes), unknown_ops)

    @staticmethod
    def unknown() -> Header:
        """The default passes, of which nobody says what the model and the user set."""
        return Header(tuple((one.name, None if one.name in ("seed", "cast_parameters") else one) for one in default_passes()))

    def placed_by(self, recipe: str, mesh: Mesh) -> Header:
        """Return the header with layouts by a recipe, without constraints or a search."""
        cast = next((one for _, one in self.passes if isinstance(one, CastParameters)), CastParameters())
        phases = Phases(Seed(recipes_of(recipe, mesh)), cast)
        given = {one.name: one for one in phases.constrain} | dict.fromkeys(PLACING, phases.choose)
        return replace(self, passes=tuple((name, given.get(name, one)) for name, one in self.passes))


def format_header(header: Header) -> str:
    """Lines of comment: of each pass, what is not as it is by default."""
    lines = [f"# unknown_ops {header.unknown_ops}"] if header.unknown_ops != "replicate" else []
    for name, one in header.passes:
        given = {} if one is None else _given(one)
        lines.append(f"# pass {name} {json.dumps(given)}" if given else f"# pass {name}")
    return "".join(f"{line}\n" for line in lines)


def _given(one: Pass) -> dict[str, object]:
    usual, said = encode(type(one)()), encode(one)
    return {field.name: said[field.name] for field in fields(one) if said[field.name] != usual[field.name]}


def parse_header(text: str) -> Header:
    """Inverse of `format_header`, before a graph; of a text without one, `Header.unknown()`.

    Raises PlanError, or UserError, that says what is damaged.
    """
    passes: list[tuple[str, Pass | None]] = []
    unknown_ops: UnknownOps = "replicate"
    for line in text.splitlines():
        if line == "# unknown_ops error":
            unknown_ops = "error"
        elif match := _LINE.fullmatch(line):
            passes.append((match[1], _read(match[1], match[2] or "{}", line)))
    return Header(tuple(passes), unknown_ops) if passes else Header.unknown()


def _read(name: str, given: str, line: str) -> Pass | None:
    if name not in _KINDS:
        return None
    try:
        said = json.loads(given)
    except json.JSONDecodeError as error:
        raise UserError(f"the dump's line {line!r} cannot be read: {error.msg}; replay a file as it was written") from error
    kind: type[Pass] = _KINDS[name]
    return decode(kind, encode(kind()) | said, name)
