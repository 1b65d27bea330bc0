"""Write the user's constraints and the decisions of recipes into the graph, as pins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.ir.graph import (
    OPTIONS,
    InputRole,
    OutputRole,
    Pin,
    Stage,
    add_pin,
    add_reshard,
    input_of,
    is_reshard,
    operands,
    origin_of,
    output_node,
    outputs_of,
    pins_of,
    placeholders,
    returned,
    set_operands,
    set_origin,
    set_recompute,
    tensor_of,
)
from passes.ir.layout import Layout, Placement, R, Shard, is_even, is_storable, next_digit, replicated
from passes.ir.padding import padded_batch
from passes.recipes import Decision, Decisions, Recipe, Site, recipe_named
from passes.recipes.storage import first_dim_that_divides, reshard_for_use


@dataclass(frozen=True)
class Constraint:
    """A placement that the user demands on one axis, of a parameter (FQN), an input or an output (path)."""

    name: str
    axis: str
    placement: Placement


@dataclass(frozen=True)
class Seed(Pass):
    """Pin parameters, inputs, outputs and values by the user's constraints and the recipes.

    1. Parameters that an earlier program stored keep their layouts; then come the user's constraints. No recipe
       overrides either.
    2. The decisions of a recipe for its axis (`Recipe.decide`) are pinned: `megatron` shards linears, embeddings and
       the values between blocks.
    3. An axis whose recipe carries the batch splits dim 0 of every input whose dim 0 is as long as that of the
       first input. If that batch was padded, the padded inputs are split over the axes in `batch`.
    4. An axis whose recipe has a `store` keeps its part of each parameter (and so of its gradient), and gathers
       the parameter before use: again in the backward if the recipe frees what was gathered. Where a parameter
       is cast to fewer bytes, the result of the cast is gathered. Parameters that another recipe uses whole
       (`Decisions.gathered`) are stored in parts and gathered as well.

    Before:

        mesh dp=2
        stage CAPTURED
        %w: f32[8, 6] = parameter("w")
        %x: f32[4, 8] = input("x")
        %mm: f32[4, 6] = mm(%x, %w)
        return output("output") %mm

    After:

        mesh dp=2
        stage CAPTURED
        %w: f32[8, 6] pinned(dp:S(0) "fsdp: stored sharded") = parameter("w")
        %x: f32[4, 8] pinned(dp:S(0) "fsdp: batch") = input("x")
        %reshard: f32[8, 6] pinned(dp:R "fsdp: gathered for use") recompute = reshard(%w)      # | seed: fsdp: gathered for use
        %mm: f32[4, 6] = mm(%x, %reshard)
        return output("output") %mm

    Context: Seed(recipes=("fsdp",))
    """

    name: ClassVar[str] = "seed"
    takes: ClassVar[Stage] = Stage.CAPTURED
    gives: ClassVar[Stage] = Stage.CAPTURED

    recipes: tuple[str | None, ...] = ()  # one per mesh axis
    params: tuple[Constraint, ...] = ()
    inputs: tuple[Constraint, ...] = ()
    outputs: tuple[Constraint, ...] = ()
    batch: tuple[int, ...] = ()  # axes that split inputs whose batch was padded, each on every rank whole
    stored: tuple[tuple[str, Layout], ...] = ()  # layouts of parameters that an earlier program stored, by FQN

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        named = zip(self.recipes, ctx.mesh.sizes, strict=False)
        recipes = {  # by axis, of those with more than one rank
            axis: recipe_named(name) for axis, (name, size) in enumerate(named) if name is not None and size > 1
        }
        pins = _Pins(gm, ctx, self)
        _keep(dict(self.stored), pins)
        _constrain(self, pins)
        gathered = _decide(recipes, pins)
        _split_batch(recipes, pins)
        _split_padded(self.batch, pins)
        _store(recipes, gathered, self, pins)
        return pins.changed


class _Pins:
    """The layouts that placeholders are pinned to, built axis by axis. The first pin on an axis wins."""

    def __init__(self, gm: GraphModule, ctx: PassContext, by: Seed) -> None:
        self.gm, self.mesh = gm, ctx.mesh
        self.layouts = {node: replicated(ctx.mesh) for node in placeholders(gm.graph)}
        self.changed = False
        self._ctx, self._by = ctx, by

    def add(self, node: Node, axis: int, placement: Placement, reason: str) -> None:
        """Pin a value on an axis, unless it is pinned there."""
        if _is_pinned(node, axis):
            return
        add_pin(node, Pin(axis, placement, reason))
        self.changed = True
        if node in self.layouts:
            self.layouts[node] = self.layouts[node].with_on(axis, placement)

    def digit_left(self, node: Node, wanted: Shard) -> Shard:
        """Return the placement that shards a dim inside of what other axes shard, mirrored if wanted."""
        return next_digit(self.layouts[node], wanted.dim, self.mesh, mirror=wanted.mirror > 0)

    def remark(self, node: Node, text: str, axis: int | None = None) -> None:
        """Say of a node what is declined, on an axis or on all."""
        self._ctx.remark(self._by, node, text if axis is None else f"on {self.mesh.names[axis]}: {text}")


# --- 1: stored parameters, and the user's constraints


def _keep(stored: Mapping[str, Layout], pins: _Pins) -> None:
    for node in placeholders(pins.gm.graph, InputRole.PARAMETER):
        if (layout := stored.get(input_of(node).name)) is not None:
            for axis, placement in enumerate(layout.placements):
                pins.add(node, axis, placement, "stored already")


def _constrain(seed: Seed, pins: _Pins) -> None:
    graph = pins.gm.graph
    for role, constraints in ((InputRole.PARAMETER, seed.params), (InputRole.INPUT, seed.inputs)):
        nodes = {input_of(node).name: node for node in placeholders(graph, role)}
        for one in constraints:
            _constrain_input(nodes[one.name], one, pins)
    values = list(returned(graph))
    for position, output in enumerate(outputs_of(graph)):
        given = [one for one in seed.outputs if output.role is OutputRole.OUTPUT and output.name == one.name]
        if given and isinstance(values[position], Node):
            values[position] = _constrain_output(values[position], given, pins)
    output_node(graph).args = (tuple(values),)


def _constrain_input(node: Node, one: Constraint, pins: _Pins) -> None:
    axis, placement = pins.mesh.index(one.axis), one.placement
    if pins.mesh.sizes[axis] == 1:
        return
    if isinstance(placement, Shard) and placement.is_bare:
        placement = pins.digit_left(node, placement)
    pins.add(node, axis, placement, OPTIONS)


def _constrain_output(value: Node, constraints: list[Constraint], pins: _Pins) -> Node:
    new = add_reshard(value, "seed: options: output")
    pins.changed = True
    for one in constraints:
        add_pin(new, Pin(pins.mesh.index(one.axis), one.placement, OPTIONS))
    return new


# --- 2: decisions of recipes


def _decide(recipes: Mapping[int, Recipe], pins: _Pins) -> dict[int, frozenset[str]]:
    """Pin what the recipes decide; return by axis the parameters that are stored in parts though they are used whole."""
    sizes = pins.mesh.sizes
    batch_parts = math.prod(sizes[axis] for axis, recipe in recipes.items() if recipe.carries_batch)
    decided: list[tuple[int, Decisions]] = []  # of all axes, before one of them changes the graph
    for axis, recipe in recipes.items():
        cutting = (sizes[other] for other, one in recipes.items() if other != axis and one.shards_compute)
        decided.append((axis, recipe.decide(Site(pins.gm, pins.mesh, axis, batch_parts, math.prod(cutting)))))
        if not recipe.carries_batch and not recipe.carries_sequence:
            batch_parts *= sizes[axis]  # values between blocks may be sharded on the batch
    for axis, decisions in decided:
        _apply(decisions, axis, pins)
    return {axis: decisions.gathered for axis, decisions in decided}


def _apply(decisions: Decisions, axis: int, pins: _Pins) -> None:
    nodes = {input_of(node).name: node for node in placeholders(pins.gm.graph, InputRole.PARAMETER)}
    for node, text in decisions.remarks:
        pins.remark(node, text, axis)
    for name, decision in decisions.parameters.items():
        _pin_parameter(nodes[name], axis, decision, pins)
    for node, decision in decisions.inputs.items():
        _pin_input(node, axis, decision, pins)
    for node, decision in decisions.values.items():
        _pin_value(node, axis, decision, pins)
    _pin_operands(decisions.operands, axis, pins)


def _pin_parameter(node: Node, axis: int, decision: Decision, pins: _Pins) -> None:
    """Pin a parameter, on the digit inside those of other axes if it cannot be stored as decided."""
    placement = decision.placement
    if isinstance(placement, Shard) and not _is_storable(node, axis, placement, pins):
        placement = pins.digit_left(node, placement)
        if not _is_storable(node, axis, placement, pins):
            shown = f"{input_of(node).name}{list(tensor_of(node).shape)}"
            pins.remark(node, f"{shown} is not sharded: nothing of dim {placement.dim} is left to split", axis)
            return
    pins.add(node, axis, placement, decision.reason)


def _is_storable(node: Node, axis: int, placement: Placement, pins: _Pins) -> bool:
    return is_storable(pins.layouts[node].with_on(axis, placement), tensor_of(node).shape, pins.mesh)


def _pin_input(node: Node, axis: int, decision: Decision, pins: _Pins) -> None:
    """Pin an input, on the digit inside those of other axes if they shard its dim already."""
    placement, shape = decision.placement, tensor_of(node).shape
    if isinstance(placement, Shard) and not is_even(pins.layouts[node].with_on(axis, placement), shape, pins.mesh):
        placement = pins.digit_left(node, placement)
        if not is_even(pins.layouts[node].with_on(axis, placement), shape, pins.mesh):
            shown = f"{input_of(node).name}{list(shape)}"
            pins.remark(node, f"{shown} is not sharded: dim {placement.dim} does not divide further", axis)
            return
    pins.add(node, axis, placement, decision.reason)


def _pin_value(node: Node, axis: int, decision: Decision, pins: _Pins) -> None:
    users = list(node.users)
    is_pinned = len(users) == 1 and is_reshard(users[0])
    new = users[0] if is_pinned else add_reshard(node, f"seed: {decision.reason}")
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    pins.add(new, axis, decision.placement, decision.reason)


def _pin_operands(uses: Mapping[tuple[Node, int], Decision], axis: int, pins: _Pins) -> None:
    """Let calls take operands through reshards; those that need the same of a value share one."""
    made: dict[tuple[Node, Decision], Node] = {}
    for (user, number), decision in uses.items():
        value = operands(user)[number]
        if (value, decision) not in made:
            made[value, decision] = new = add_reshard(value, f"seed: {decision.reason}")
            set_recompute(new, decision.again)
            set_origin(new, origin_of(user))
            pins.add(new, axis, decision.placement, decision.reason)
        changed = list(operands(user))
        changed[number] = made[value, decision]
        set_operands(user, changed)


# --- 3: the batch


def _split_batch(recipes: Mapping[int, Recipe], pins: _Pins) -> None:
    inputs = [n for n in placeholders(pins.gm.graph, InputRole.INPUT) if tensor_of(n).dim() > 0]
    if not inputs:
        return
    batch = tensor_of(inputs[0]).shape[0]
    for axis, recipe in recipes.items():
        if not recipe.carries_batch:
            continue
        for node in inputs:
            if tensor_of(node).shape[0] == batch and not _is_pinned(node, axis):
                _pin_input(node, axis, Decision(Shard(0), f"{recipe.name}: batch"), pins)


def _split_padded(axes: tuple[int, ...], pins: _Pins) -> None:
    """Pin a padded batch, of inputs that every rank has whole."""
    padded = (padded_batch(node) for node in placeholders(pins.gm.graph, InputRole.INPUT))
    for value in [value for value in padded if value is not None]:
        outer = 1
        for axis in axes:
            _pin_value(value, axis, Decision(Shard(0, outer), "padded batch"), pins)
            outer *= pins.mesh.sizes[axis]


# --- 4: parameters between steps


def _store(recipes: Mapping[int, Recipe], whole: Mapping[int, frozenset[str]], seed: Seed, pins: _Pins) -> None:
    """Store parameters in parts and gather them: all on the axis of a recipe with a `store`, and those in `whole`."""
    asked = {(one.name, pins.mesh.index(one.axis)) for one in seed.params}
    for node in placeholders(pins.gm.graph, InputRole.PARAMETER):
        name, gathered = input_of(node).name, dict[int, Recipe]()
        for axis, recipe in recipes.items():
            if recipe.store is not None:
                is_stored = _store_part(node, axis, recipe, pins)
            else:
                is_stored = name in whole[axis] and (name, axis) not in asked and _store_whole(node, axis, recipe, pins)
            if is_stored:
                gathered[axis] = recipe
        if gathered:
            _gather(node, gathered)


def _store_whole(node: Node, axis: int, recipe: Recipe, pins: _Pins) -> bool:
    """Pin an even part of a parameter that is used whole; return False if there is none."""
    shape = tuple(tensor_of(node).shape)
    if not _is_pinned(node, axis):
        placement = first_dim_that_divides(pins.layouts[node], axis, shape, pins.mesh)
        if placement is None or not is_even(pins.layouts[node].with_on(axis, placement), shape, pins.mesh):
            return False
        pins.add(node, axis, placement, f"{recipe.name}: used whole, stored in parts")
    return isinstance(pins.layouts[node].on(axis), Shard)


def _store_part(node: Node, axis: int, recipe: Recipe, pins: _Pins) -> bool:
    """Pin the placement of a parameter's stored part on `axis`; return False if the parameter stays whole."""
    if _is_pinned(node, axis):
        return True
    shape = tuple(tensor_of(node).shape)
    assert recipe.store is not None
    placement = recipe.store(pins.layouts[node], axis, shape, pins.mesh)
    if placement is None:
        pins.remark(node, f"{input_of(node).name}{list(shape)} is not sharded: no dim can be split")
        return False
    if placement == R:
        pins.add(node, axis, R, f"{recipe.name}: stored whole")
        return False
    pins.add(node, axis, placement, f"{recipe.name}: stored sharded")
    return True


def _gather(node: Node, recipes: Mapping[int, Recipe]) -> None:
    value = node
    while len(value.users) == 1 and _is_narrowing_cast(user := next(iter(value.users)), value):
        value = user
    users = [user for user in value.users if user.op != "output"]
    if not users:
        return
    again = all(recipe.frees_gathered or recipe.store is None for recipe in recipes.values())
    first = next(iter(recipes.values()))
    new = reshard_for_use(value, users, f"seed: {first.name}: gathered for use", again=again)
    set_origin(new, origin_of(min(users)))  # a parameter has no module or line of its own
    for axis, recipe in recipes.items():
        add_pin(new, Pin(axis, R, f"{recipe.name}: gathered for use"))


def _is_pinned(node: Node, axis: int) -> bool:
    return any(pin.axis == axis for pin in pins_of(node))


def _is_narrowing_cast(user: Node, value: Node) -> bool:
    if str(user.target) != "prims.convert_element_type.default":
        return False
    return tensor_of(user).element_size() < tensor_of(value).element_size()
