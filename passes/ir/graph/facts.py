"""Facts that passes know of a node beyond FX: one record per node, under one key of `node.meta`.

A record is never changed in place: setting a fact replaces the record, so that copied nodes may share one.
Functions named after a fact read it or set it; `update_facts` sets several.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch.fx import Node

from passes.errors import CompilerError
from passes.ir.graph.roles import Input, Output
from passes.ir.layout import Layout, Placement

KEY = "autoshard"  # in `node.meta`, of Facts; in `gm.meta`, of GraphFacts
_TORCH_PLACE = ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag")  # keys of torch: where a node comes from

Saving = Literal["saved", "remade"]
SAVINGS: tuple[Saving, ...] = ("saved", "remade")


@dataclass(frozen=True)
class Origin:
    """The place in the user's code that a node comes from."""

    fqn: str = ""  # innermost module
    file: str = ""
    line: int = 0
    source: str = ""  # the text of the line

    def __str__(self) -> str:
        place = f"{self.file.rsplit('/', 1)[-1]}:{self.line}" if self.file else ""
        return " ".join(part for part in (place, self.fqn) if part)


OPTIONS = "options"  # the reason of a pin that the user gave


@dataclass(frozen=True)
class Pin:
    """A constraint: the placement of a value on one axis, and who gave it."""

    axis: int
    placement: Placement
    reason: str


@dataclass(frozen=True)
class Transfer:
    """The reshard that a functional collective of a LOCAL graph was before it was lowered."""

    kind: str  # a name in `passes.ir.collectives`: "all_gather", "reduce_scatter", ...
    axes: tuple[str, ...]
    steps: tuple[str, ...] = field(default=(), compare=False)  # the collectives of the plan that it runs, by id
    what: str = field(default="", compare=False)  # what the local form of a rule sends; empty: a reshard's value


@dataclass(frozen=True)
class Facts:
    """All that is known of a node; `None`, empty or false if nothing was recorded."""

    input: Input | None = None  # of a placeholder
    outputs: tuple[Output, ...] | None = None  # of the output node
    layouts: tuple[Layout, ...] | None = None  # one per tensor result
    needs: tuple[Layout, ...] | None = None  # one per operand
    pins: tuple[Pin, ...] = ()  # of a reshard or placeholder; axes not named follow the operand
    origin: Origin = Origin()
    region: int | None = None  # number of the `torch.utils.checkpoint` call of the user's program
    note: str = ""  # "pass: reason" where a pass made the node
    made_for: str | None = None  # the name of the call that it is a part of, before a pass cut that
    draw: int | None = None  # of a random call: its ordinal in the captured program; of a key of its numbers: what makes it
    recompute: bool = False  # the backward recomputes the value instead of keeping it from the forward
    saving: Saving | None = None  # saved for the backward or computed again; None: as the partitioner says
    stands_for: tuple[str, ...] = ()  # of a LOCAL graph: values of the COLLECTIVE graph that it is a part of
    transfer: Transfer | None = None  # of a functional collective


NOTHING = Facts()


def facts_of(node: Node) -> Facts:
    """Return the record of `node`."""
    found: Facts = node.meta.get(KEY, NOTHING)
    return found


def update_facts(node: Node, **changes: object) -> None:
    """Set fields of the record of `node`, by name; a record that does not change stays the same object."""
    old = facts_of(node).__dict__
    if all(old[name] is value for name, value in changes.items()):
        return
    new = object.__new__(Facts)  # as dataclasses.replace, at a fifth of its time: graphs have thousands of nodes
    new.__dict__.update(old, **changes)
    node.meta[KEY] = new


def copy_facts(source: Node, target: Node) -> None:
    """Give `target`, made from `source`, its place in the user's program."""
    facts = facts_of(source)
    update_facts(target, origin=facts.origin, region=facts.region)
    for key in _TORCH_PLACE:
        if key in source.meta:
            target.meta[key] = source.meta[key]


def input_of(node: Node) -> Input:
    """Return what placeholder `node` stands for."""
    found = facts_of(node).input
    assert found is not None, node
    return found


def has_input(node: Node) -> bool:
    return facts_of(node).input is not None


def set_input(node: Node, value: Input) -> None:
    update_facts(node, input=value)


def layout_of(node: Node) -> Layout:
    """Return the layout of a node with one tensor result."""
    layouts = layouts_of(node)
    if len(layouts) != 1:
        raise CompilerError(f"%{node.name} has {len(layouts)} results; ask for layouts_of")
    return layouts[0]


def layouts_of(node: Node) -> tuple[Layout, ...]:
    """Return one layout per result."""
    found = facts_of(node).layouts
    if found is None:
        raise CompilerError(f"%{node.name} has no layout; it was not placed")
    return found


def has_layout(node: Node) -> bool:
    return facts_of(node).layouts is not None


def set_layouts(node: Node, *layouts: Layout) -> None:
    update_facts(node, layouts=layouts)


def needs_of(node: Node) -> tuple[Layout, ...]:
    """Return the layout that `node` needs of each tensor operand, in the order of `operands`."""
    found = facts_of(node).needs
    assert found is not None, node
    return found


def has_needs(node: Node) -> bool:
    return facts_of(node).needs is not None


def set_needs(node: Node, needs: tuple[Layout, ...]) -> None:
    update_facts(node, needs=needs)


def pins_of(node: Node) -> tuple[Pin, ...]:
    """Return the constraints on a reshard node or placeholder."""
    return facts_of(node).pins


def add_pin(node: Node, pin: Pin) -> None:
    update_facts(node, pins=(*pins_of(node), pin))


def origin_of(node: Node) -> Origin:
    return facts_of(node).origin


def set_origin(node: Node, origin: Origin) -> None:
    update_facts(node, origin=origin)


def note_of(node: Node) -> str:
    """Return why a pass made this node, `"pass: reason"`; empty for nodes of the user's program."""
    return facts_of(node).note


def set_note(node: Node, note: str) -> None:
    update_facts(node, note=note)


def made_for(node: Node) -> str:
    """Return the name of the call that `node` is a part of, in the graph before a pass cut it; else its own."""
    return facts_of(node).made_for or node.name


def set_made_for(node: Node, name: str) -> None:
    update_facts(node, made_for=name)


def draw_of(node: Node) -> int | None:
    """Return the ordinal of a random call: its copies draw the same numbers, wherever passes put them."""
    return facts_of(node).draw


def set_draw(node: Node, draw: int) -> None:
    update_facts(node, draw=draw)


def is_recompute(node: Node) -> bool:
    """Return whether the backward recomputes this value instead of keeping it from the forward."""
    return facts_of(node).recompute


def set_recompute(node: Node, recompute: bool) -> None:
    update_facts(node, recompute=recompute)


def saving_of(node: Node) -> Saving | None:
    """Return whether a value is saved for the backward or recomputed; None: the partitioner decides."""
    return facts_of(node).saving


def set_saving(node: Node, saving: Saving | None) -> None:
    update_facts(node, saving=saving)


def region_of(node: Node) -> int | None:
    """Return the number of the `torch.utils.checkpoint` call of the user's program that a node is part of."""
    return facts_of(node).region


def set_region(node: Node, region: int) -> None:
    update_facts(node, region=region)


def stands_for(node: Node) -> tuple[str, ...]:
    """Return the names of the values of the COLLECTIVE graph whose part on each device a node of a LOCAL graph gives."""
    return facts_of(node).stands_for


def set_stands_for(node: Node, names: tuple[str, ...]) -> None:
    update_facts(node, stands_for=names)


def transfer_of(node: Node) -> Transfer | None:
    """Return what a functional collective moves and over which axes, None for other nodes."""
    return facts_of(node).transfer


def set_transfer(node: Node, transfer: Transfer) -> None:
    update_facts(node, transfer=transfer)
