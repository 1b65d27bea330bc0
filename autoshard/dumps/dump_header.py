"""Write a pipeline and the settings of its passes as comments above a dumped graph, so that it can be run again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from autoshard.config.axis_recipes import compute_parts, recipes_of, sequence_parts
from autoshard.phases import Phases, default_passes
from autoshard.plans.codec import decode, encode
from passes.base import Pass
from passes.cast_parameters import CastParameters
from passes.errors import UserError
from passes.ir.mesh import Mesh
from passes.pad import Pad
from passes.seed import Seed

UnknownOps = Literal["replicate", "error"]
PLACING = ("propagate", "solve")  # either one places values, at the same position in the pipeline
_KINDS = {one.name: type(one) for one in default_passes()}
_LINE = re.compile(r"# pass (\w+)(?: (\{.*\}))?")


@dataclass(frozen=True)
class Header:
    """Passes by name; None for one whose settings cannot be written as text: a search, or a pass of the user's own."""

    passes: tuple[tuple[str, Pass | None], ...]
    unknown_ops: UnknownOps = "replicate"

    @staticmethod
    def of(passes: Sequence[Pass], unknown_ops: UnknownOps) -> Header:
        return Header(tuple((one.name, one if type(one) is _KINDS.get(one.name) else None) for one in passes), unknown_ops)

    @staticmethod
    def unknown() -> Header:
        """Return the default passes for a dump without a header, without those that depend on the model and the user.
        """
        return Header(tuple((one.name, None if one.name in ("seed", "cast_parameters") else one) for one in default_passes()))

    def placed_by(self, recipe: str, mesh: Mesh) -> Header:
        """Return the header with a recipe's layouts, instead of constraints and searched layouts.

        A batch that was padded is padded again, and split over the same axes.
        """
        passes = [one for _, one in self.passes]
        cast = next((one for one in passes if isinstance(one, CastParameters)), CastParameters())
        pad = next((one for one in passes if isinstance(one, Pad)), Pad())
        recipes, old = recipes_of(recipe, mesh), next((one for one in passes if isinstance(one, Seed)), Seed())
        seed = Seed(recipes, inputs=old.inputs, batch=old.batch) if old.batch else Seed(recipes)
        phases = Phases(seed, cast, pad=Pad(compute_parts(recipes, mesh), pad.batch_parts, sequence_parts(recipes, mesh)))
        given = {one.name: one for one in (*phases.prepare, *phases.constrain)} | dict.fromkeys(PLACING, phases.choose)
        return replace(self, passes=tuple((name, given.get(name, one)) for name, one in self.passes))


def format_header(header: Header) -> str:
    """Return one comment line per pass, with the settings that differ from the default."""
    lines = [f"# unknown_ops {header.unknown_ops}"] if header.unknown_ops != "replicate" else []
    for name, one in header.passes:
        given = {} if one is None else _given(one)
        lines.append(f"# pass {name} {json.dumps(given)}" if given else f"# pass {name}")
    return "".join(f"{line}\n" for line in lines)


def _given(one: Pass) -> dict[str, object]:
    default, own = encode(type(one)()), encode(one)
    return {field.name: own[field.name] for field in fields(one) if own[field.name] != default[field.name]}


def parse_header(text: str) -> Header:
    """Parse the header above a graph, as `format_header` wrote it; return `Header.unknown()` for a text without one.

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
        settings = json.loads(given)
    except json.JSONDecodeError as error:
        raise UserError(f"the dump's line {line!r} cannot be read: {error.msg}; replay a file as it was written") from error
    kind: type[Pass] = _KINDS[name]
    return decode(kind, encode(kind()) | settings, name)
