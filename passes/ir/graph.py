"""What a graph says beyond FX: stages, roles of inputs and outputs, layouts, origins, and the reshard op.

Everything that passes share about a node goes through the functions here; nothing else touches
`node.meta` under a key of ours.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import OpOverload, module_of
from passes.errors import CompilerError
from passes.ir.layout import Layout, Placement


class Stage(enum.IntEnum):
    """What is true of a graph; each stage includes those before it, up to LOCAL."""

    CAPTURED = 0  # single-device ATen graph, global shapes
    PLACED = 1  # every tensor value has a layout, every operand a needed layout
    EXPLICIT = 2  # every operand has the layout that its user needs: disagreements are reshard nodes
    COLLECTIVE = 3  # no reshard nodes: functional collectives and local ops
    LOCAL = 4  # shapes are per device
    SCHEDULED = 5  # node order is the issue order


class InputRole(enum.Enum):
    PARAMETER = "parameter"  # name: FQN
    BUFFER = "buffer"  # name: FQN
    INPUT = "input"  # name: path in (args, kwargs), such as "tokens" or "batch.labels"
    TANGENT = "tangent"  # name: path of the output
    COORDINATE = "coordinate"  # name: axis; this rank's place on it, i64[1]
    SEED = "seed"  # name: "step"; i64[], equal on all ranks, new at every call
    SAVED = "saved"  # name: the forward's node; what a partitioned backward is given of it


class OutputRole(enum.Enum):
    OUTPUT = "output"  # name: path in the model's output, such as "loss" or "0"
    BUFFER = "buffer"  # name: FQN; the buffer's new value
    GRADIENT = "gradient"  # name: FQN of the parameter (or "input:<path>" of an input)
    SAVED = "saved"  # name: of the node; what a partitioned forward keeps for the backward


@dataclass(frozen=True)
class Input:
    """What a placeholder stands for."""

    role: InputRole
    name: str


@dataclass(frozen=True)
class Output:
    """What one element of the graph's output stands for."""

    role: OutputRole
    name: str


@dataclass(frozen=True)
class Origin:
    """Where a node comes from in the user's code."""

    fqn: str = ""  # innermost module
    file: str = ""
    line: int = 0
    source: str = ""  # the text of the line

    def __str__(self) -> str:
        place = f"{self.file.rsplit('/', 1)[-1]}:{self.line}" if self.file else ""
        return " ".join(part for part in (place, self.fqn) if part)


@dataclass(frozen=True)
class Pin:
    """An insisted placement of a value on one axis, and who insists."""

    axis: int
    placement: Placement
    reason: str


def reshard(value: torch.Tensor) -> torch.Tensor:
    """Change of layout: from the operand's to the node's own. An identity on one device."""
    return value


def is_reshard(node: Node) -> bool:
    return node.op == "call_function" and node.target is reshard


def stage_of(gm: GraphModule) -> Stage:
    return Stage(gm.meta["autoshard_stage"])


def set_stage(gm: GraphModule, stage: Stage) -> None:
    gm.meta["autoshard_stage"] = int(stage)


def input_of(node: Node) -> Input:
    """What placeholder `node` stands for."""
    return _input(node.meta["autoshard_input"])


def _input(value: Any) -> Input:
    assert isinstance(value, Input)
    return value


def has_input(node: Node) -> bool:
    return "autoshard_input" in node.meta


def set_input(node: Node, value: Input) -> None:
    node.meta["autoshard_input"] = value


def outputs_of(graph: Graph) -> tuple[Output, ...]:
    """What each element of the output tuple stands for."""
    return tuple(output_node(graph).meta["autoshard_outputs"])


def has_outputs(graph: Graph) -> bool:
    return "autoshard_outputs" in output_node(graph).meta


def set_outputs(graph: Graph, outputs: tuple[Output, ...]) -> None:
    output_node(graph).meta["autoshard_outputs"] = outputs


def output_node(graph: Graph) -> Node:
    return graph.output_node()


def returned(graph: Graph) -> tuple[Any, ...]:
    """The nodes (or None) of the output tuple."""
    values = output_node(graph).args[0]
    assert isinstance(values, tuple | list)
    return tuple(values)


def placeholders(graph: Graph, role: InputRole | None = None) -> tuple[Node, ...]:
    """Placeholders in order, of one role if given."""
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    return tuple(node for node in nodes if role is None or input_of(node).role is role)


def layout_of(node: Node) -> Layout:
    """Layout of a node with one tensor result."""
    layouts = layouts_of(node)
    if len(layouts) != 1:
        raise CompilerError(f"%{node.name} has {len(layouts)} results; ask for layouts_of")
    return layouts[0]


def layouts_of(node: Node) -> tuple[Layout, ...]:
    """One layout per result."""
    if "autoshard_layouts" not in node.meta:
        raise CompilerError(f"%{node.name} has no layout; it was not placed")
    return tuple(node.meta["autoshard_layouts"])


def has_layout(node: Node) -> bool:
    return "autoshard_layouts" in node.meta


def set_layouts(node: Node, *layouts: Layout) -> None:
    node.meta["autoshard_layouts"] = layouts


def needs_of(node: Node) -> tuple[Layout, ...]:
    """The layout that `node` needs of each tensor operand, in the order of `operands`."""
    return tuple(node.meta["autoshard_needs"])


def has_needs(node: Node) -> bool:
    return "autoshard_needs" in node.meta


def set_needs(node: Node, needs: tuple[Layout, ...]) -> None:
    node.meta["autoshard_needs"] = needs


def pins_of(node: Node) -> tuple[Pin, ...]:
    """Placements insisted on for a reshard node or placeholder; axes not named follow the operand."""
    return tuple(node.meta.get("autoshard_pins", ()))


def add_pin(node: Node, pin: Pin) -> None:
    node.meta["autoshard_pins"] = (*pins_of(node), pin)


def origin_of(node: Node) -> Origin:
    return _origin(node.meta.get("autoshard_origin", Origin()))


def _origin(value: Any) -> Origin:
    assert isinstance(value, Origin)
    return value


def set_origin(node: Node, origin: Origin) -> None:
    node.meta["autoshard_origin"] = origin


def note_of(node: Node) -> str:
    """Why a pass made this node: `"pass: reason"`; empty for nodes of the user's program."""
    return str(node.meta.get("autoshard_note", ""))


def set_note(node: Node, note: str) -> None:
    node.meta["autoshard_note"] = note


def made_for(node: Node) -> str:
    """Name of the call that `node` does a part of the work of, in the graph before a pass cut it; else its own."""
    return str(node.meta.get("autoshard_made_for", node.name))


def set_made_for(node: Node, name: str) -> None:
    node.meta["autoshard_made_for"] = name


def value_of(node: Node) -> Any:
    """The fake tensor (or tuple of them, or number) that the node gives."""
    return node.meta["val"]


def has_value(node: Node) -> bool:
    return "val" in node.meta


def set_value(node: Node, value: Any) -> None:
    node.meta["val"] = value


def tensor_of(node: Node) -> torch.Tensor:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise CompilerError(f"%{node.name} is not a tensor but {type(value).__name__}")
    return value


def results_of(node: Node) -> tuple[torch.Tensor, ...]:
    """Tensor results: one, or those of a tuple (an element that is no tensor is left out)."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple | list):
        return tuple(v for v in value if isinstance(v, torch.Tensor))
    return ()


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
_NUMBERS = (int, float)


def operands(node: Node) -> tuple[Node, ...]:
    """Tensor operands in order of appearance in args, then kwargs; a node used twice appears twice.

    A node whose value is a number (attention's `max_q`) is no operand.
    """
    found: list[Node] = []
    for value in node.args:
        if isinstance(value, Node):
            found.append(value)
        elif not isinstance(value, _PLAIN):
            _collect(value, found)
    if node.kwargs:
        _collect(node.kwargs, found)
    return tuple([value for value in found if not isinstance(value.meta.get("val"), _NUMBERS)])


def _collect(value: Any, found: list[Node]) -> None:
    if isinstance(value, Node):
        found.append(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, slice):
        _collect((value.start, value.stop, value.step), found)


def item_of(node: Node) -> tuple[Node, int] | None:
    """The node that a `getitem` takes a tensor from, and the tensor's position among its `results_of`."""
    if node.target is not operator.getitem or not is_tensor(node):
        return None
    source, index = node.args
    assert isinstance(source, Node) and isinstance(index, int)
    return source, sum(isinstance(value, torch.Tensor) for value in value_of(source)[:index])


def layout_given(user: Node, operand: Node) -> Layout:
    """The layout in which `user` gets `operand`: for a `getitem`, that of the item."""
    item = item_of(user)
    return layouts_of(item[0])[item[1]] if item is not None else layout_of(operand)


def inserting_after(node: Node) -> AbstractContextManager[Any]:
    """Where a call that uses `node` can stand first: behind it, and behind all placeholders."""
    while node.next.op == "placeholder":
        node = node.next
    return node.graph.inserting_after(node)


def add_call(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """As `graph.call_function`, with a name as capture gives them: `%mm`, not `%mm_default`."""
    name = target.overloadpacket.__name__ if isinstance(target, OpOverload) else None
    return graph.create_node("call_function", target, args, kwargs, name)


def add_reshard(value: Node, note: str) -> Node:
    """A reshard of `value` behind it; who uses it, and its layout or pins, is the caller's to say."""
    with inserting_after(value):
        new = value.graph.call_function(reshard, (value,))
    copy_facts(value, new)
    set_value(new, value_of(value))
    set_note(new, note)
    return new


def values_in(argument: Any) -> Any:
    """Arguments of a call with each node replaced by its value; sequences become lists."""
    if isinstance(argument, Node):
        return value_of(argument)
    if isinstance(argument, tuple | list):
        return [values_in(item) for item in argument]
    if isinstance(argument, dict):
        return {key: values_in(item) for key, item in argument.items()}
    return argument


def copy_facts(source: Node, target: Node) -> None:
    """Give `target`, made from `source`, its place in the user's program."""
    for key in ("autoshard_origin", "autoshard_region", "stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def copy_graph(gm: GraphModule) -> GraphModule:
    """A graph of its own with the same nodes, names and facts; fake values are shared."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    copied = module_of(graph, gm)
    copied.meta = dict(gm.meta)
    return copied


def draw_of(node: Node) -> int | None:
    """Ordinal of a random call in the captured program: its copies draw the same numbers, wherever passes put them."""
    draw = node.meta.get("autoshard_draw")
    return None if draw is None else int(draw)


def set_draw(node: Node, draw: int) -> None:
    node.meta["autoshard_draw"] = draw


def is_recompute(node: Node) -> bool:
    """Whether the backward makes this value again rather than keep it from the forward."""
    return bool(node.meta.get("autoshard_recompute", False))


def set_recompute(node: Node, recompute: bool) -> None:
    node.meta["autoshard_recompute"] = recompute


Saving = Literal["saved", "remade"]
SAVINGS: tuple[Saving, ...] = ("saved", "remade")


def made_again(graph: Graph) -> set[Node]:
    """What the backward makes once more, if it needs it: what is to be (`is_recompute`), and what is made of that or of
    parameters alone."""
    static, again = set[Node](), set[Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            static.update({node} if input_of(node).role is InputRole.PARAMETER else ())
            continue
        sources = operands(node)
        is_static = bool(sources) and all(source in static for source in sources)
        static.update({node} if is_static else ())
        if is_recompute(node):
            again.add(node)
        elif node.op != "output" and any(source in again for source in sources):
            follows = is_static and all(source in again or source.op == "placeholder" for source in sources)
            again.update({node} if follows or len(sources) == 1 else ())
    return again


def saving_of(node: Node) -> Saving | None:
    """Whether the forward keeps a value for the backward, or the backward computes it again; None: as the partitioner says."""
    saving: Saving | None = node.meta.get("autoshard_saving")
    return saving


def set_saving(node: Node, saving: Saving | None) -> None:
    node.meta["autoshard_saving"] = saving


def region_of(node: Node) -> int | None:
    """Number of the `torch.utils.checkpoint` call of the user's program that a node is of."""
    region: int | None = node.meta.get("autoshard_region")
    return region


def set_region(node: Node, region: int) -> None:
    node.meta["autoshard_region"] = region


def stands_for(node: Node) -> tuple[str, ...]:
    """Names of the values of the COLLECTIVE graph whose part on each device a node of a LOCAL graph gives."""
    return tuple(node.meta.get("autoshard_stands_for", ()))


def set_stands_for(node: Node, names: tuple[str, ...]) -> None:
    node.meta["autoshard_stands_for"] = names


@dataclass(frozen=True)
class Transfer:
    """What a functional collective of a LOCAL graph was before it was lowered."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"
    axes: tuple[str, ...]
    steps: tuple[str, ...] = field(default=(), compare=False)  # the collectives of the plan that it runs, by id


def transfer_of(node: Node) -> Transfer | None:
    """What a collective node moves and over which axes; None for any other node."""
    return _transfer(node.meta.get("autoshard_transfer"))


def _transfer(value: Any) -> Transfer | None:
    assert value is None or isinstance(value, Transfer)
    return value


def set_transfer(node: Node, transfer: Transfer) -> None:
    node.meta["autoshard_transfer"] = transfer
