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
from passes.recipes import Decision, Decisions, Site, recipe_named
from passes.recipes.storage import reshard_for_use


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
       first input.
    4. An axis whose recipe has a `store` keeps its part of each parameter (and so of its gradient), and gathers
       the parameter before use: again in the backward if the recipe frees what was gathered. Where a parameter
       is cast to fewer bytes, the result of the cast is gathered.

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
    stored: tuple[tuple[str, Layout], ...] = ()  # layouts of parameters that an earlier program stored, by FQN

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        seeds = _Seeds(self, gm, ctx)
        seeds.keep()
        seeds.constrain()
        seeds.decide()
        seeds.split_batch()
        seeds.store()
        return seeds.changed


class _Seeds:
    """The layouts that placeholders are pinned to, built axis by axis. The first pin on an axis wins."""

    def __init__(self, seed: Seed, gm: GraphModule, ctx: PassContext) -> None:
        self.seed, self.gm, self.ctx, self.mesh = seed, gm, ctx, ctx.mesh
        named = zip(seed.recipes, ctx.mesh.sizes, strict=False)
        self.recipes = {  # by axis, of those with more than one rank
            axis: recipe_named(name) for axis, (name, size) in enumerate(named) if name is not None and size > 1
        }
        self.layouts = {node: replicated(ctx.mesh) for node in placeholders(gm.graph)}
        self.changed = False

    def pin(self, node: Node, axis: int, placement: Placement, reason: str) -> None:
        if _is_pinned(node, axis):
            return
        add_pin(node, Pin(axis, placement, reason))
        self.changed = True
        if node in self.layouts:
            self.layouts[node] = self.layouts[node].with_on(axis, placement)

    # --- 1: stored parameters, and the user's constraints

    def keep(self) -> None:
        stored = dict(self.seed.stored)
        for node in placeholders(self.gm.graph, InputRole.PARAMETER):
            if (layout := stored.get(input_of(node).name)) is not None:
                for axis, placement in enumerate(layout.placements):
                    self.pin(node, axis, placement, "stored already")

    def constrain(self) -> None:
        for role, constraints in ((InputRole.PARAMETER, self.seed.params), (InputRole.INPUT, self.seed.inputs)):
            nodes = {input_of(node).name: node for node in placeholders(self.gm.graph, role)}
            for one in constraints:
                self._constrain(nodes[one.name], one)
        values = list(returned(self.gm.graph))
        for position, output in enumerate(outputs_of(self.gm.graph)):
            given = [one for one in self.seed.outputs if output.role is OutputRole.OUTPUT and output.name == one.name]
            if given and isinstance(values[position], Node):
                values[position] = self._pin_returned(values[position], given)
        output_node(self.gm.graph).args = (tuple(values),)

    def _constrain(self, node: Node, one: Constraint) -> None:
        axis, placement = self.mesh.index(one.axis), one.placement
        if self.mesh.sizes[axis] == 1:
            return
        if isinstance(placement, Shard) and placement.outer == 1:
            placement = next_digit(self.layouts[node], placement.dim, self.mesh)
        self.pin(node, axis, placement, OPTIONS)

    def _pin_returned(self, value: Node, constraints: list[Constraint]) -> Node:
        new = add_reshard(value, "seed: options: output")
        self.changed = True
        for one in constraints:
            add_pin(new, Pin(self.mesh.index(one.axis), one.placement, OPTIONS))
        return new

    # --- 2: decisions of recipes

    def decide(self) -> None:
        batch_parts = math.prod(self.mesh.sizes[axis] for axis, recipe in self.recipes.items() if recipe.carries_batch)
        decided: list[tuple[int, Decisions]] = []  # of all axes, before one changes the graph
        for axis, recipe in self.recipes.items():
            decided.append((axis, recipe.decide(Site(self.gm, self.mesh, axis, batch_parts, self._feature_parts(axis)))))
            if not recipe.carries_batch and not recipe.carries_sequence:
                batch_parts *= self.mesh.sizes[axis]  # values between blocks may be sharded on the batch
        for axis, decisions in decided:
            self._apply(decisions, axis)

    def _feature_parts(self, axis: int) -> int:
        """Return how many parts axes other than `axis` cut heads and channels into."""
        others = (other for other, recipe in self.recipes.items() if other != axis and recipe.shards_compute)
        return math.prod(self.mesh.sizes[other] for other in others)

    def _apply(self, decisions: Decisions, axis: int) -> None:
        nodes = {input_of(node).name: node for node in placeholders(self.gm.graph, InputRole.PARAMETER)}
        for node, text in decisions.remarks:
            self.ctx.remark(self.seed, node, f"on {self.mesh.names[axis]}: {text}")
        for name, decision in decisions.parameters.items():
            node, placement = nodes[name], decision.placement
            if isinstance(placement, Shard) and not self._is_storable(node, axis, placement):
                placement = next_digit(self.layouts[node], placement.dim, self.mesh)
                if not self._is_storable(node, axis, placement):
                    text = f"{name}{list(tensor_of(node).shape)} is not sharded: nothing of dim {placement.dim} is left to split"
                    self.ctx.remark(self.seed, node, f"on {self.mesh.names[axis]}: {text}")
                    continue
            self.pin(node, axis, placement, decision.reason)
        for node, decision in decisions.inputs.items():
            self._pin_input(node, axis, decision)
        for node, decision in decisions.values.items():
            self._pin_value(node, axis, decision)
        self._pin_operands(decisions.operands, axis)

    def _pin_input(self, node: Node, axis: int, decision: Decision) -> None:
        """Pin an input, on the digit inside those of other axes if they shard its dim already."""
        placement, shape = decision.placement, tensor_of(node).shape
        if isinstance(placement, Shard) and not is_even(self.layouts[node].with_on(axis, placement), shape, self.mesh):
            placement = next_digit(self.layouts[node], placement.dim, self.mesh)
            if not is_even(self.layouts[node].with_on(axis, placement), shape, self.mesh):
                text = f"{input_of(node).name}{list(shape)} is not sharded: dim {placement.dim} does not divide further"
                self.ctx.remark(self.seed, node, f"on {self.mesh.names[axis]}: {text}")
                return
        self.pin(node, axis, placement, decision.reason)

    def _is_storable(self, node: Node, axis: int, placement: Placement) -> bool:
        return is_storable(self.layouts[node].with_on(axis, placement), tensor_of(node).shape, self.mesh)

    def _pin_value(self, node: Node, axis: int, decision: Decision) -> None:
        users = list(node.users)
        is_pinned = len(users) == 1 and is_reshard(users[0])
        new = users[0] if is_pinned else add_reshard(node, f"seed: {decision.reason}")
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.pin(new, axis, decision.placement, decision.reason)

    def _pin_operands(self, uses: Mapping[tuple[Node, int], Decision], axis: int) -> None:
        """Let calls take operands through reshards; those that need the same of a value share one."""
        made: dict[tuple[Node, Decision], Node] = {}
        for (user, number), decision in uses.items():
            value = operands(user)[number]
            if (value, decision) not in made:
                made[value, decision] = new = add_reshard(value, f"seed: {decision.reason}")
                set_recompute(new, decision.again)
                set_origin(new, origin_of(user))
                self.pin(new, axis, decision.placement, decision.reason)
            changed = list(operands(user))
            changed[number] = made[value, decision]
            set_operands(user, changed)

    # --- 3: the batch

    def split_batch(self) -> None:
        inputs = [n for n in placeholders(self.gm.graph, InputRole.INPUT) if tensor_of(n).dim() > 0]
        if not inputs:
            return
        batch = tensor_of(inputs[0]).shape[0]
        for axis, recipe in self.recipes.items():
            if not recipe.carries_batch:
                continue
            for node in inputs:
                if tensor_of(node).shape[0] == batch:
                    self.pin(node, axis, next_digit(self.layouts[node], 0, self.mesh), f"{recipe.name}: batch")

    # --- 4: parameters between steps

    def store(self) -> None:
        storing = [axis for axis, recipe in self.recipes.items() if recipe.store is not None]
        if not storing:
            return
        for node in placeholders(self.gm.graph, InputRole.PARAMETER):
            gathered = [axis for axis in storing if self._store(node, axis)]
            if gathered:
                self._gather(node, gathered)

    def _store(self, node: Node, axis: int) -> bool:
        """Pin the placement of a parameter's stored part on `axis`; return False if the parameter stays whole."""
        recipe = self.recipes[axis]
        if _is_pinned(node, axis):
            return True
        shape = tuple(tensor_of(node).shape)
        assert recipe.store is not None
        placement = recipe.store(self.layouts[node], axis, shape, self.mesh)
        if placement is None:
            self.ctx.remark(self.seed, node, f"{input_of(node).name}{list(shape)} is not sharded: no dim can be split")
            return False
        if placement == R:
            self.pin(node, axis, R, f"{recipe.name}: stored whole")
            return False
        self.pin(node, axis, placement, f"{recipe.name}: stored sharded")
        return True

    def _gather(self, node: Node, axes: list[int]) -> None:
        value = node
        while len(value.users) == 1 and _is_narrowing_cast(user := next(iter(value.users)), value):
            value = user
        users = [user for user in value.users if user.op != "output"]
        if not users:
            return
        recipes = {axis: self.recipes[axis] for axis in axes}
        again = all(recipe.frees_gathered for recipe in recipes.values())
        new = reshard_for_use(value, users, f"seed: {recipes[axes[0]].name}: gathered for use", again=again)
        set_origin(new, origin_of(users[0]))  # a parameter has no module or line of its own
        for axis, recipe in recipes.items():
            add_pin(new, Pin(axis, R, f"{recipe.name}: gathered for use"))


def _is_pinned(node: Node, axis: int) -> bool:
    return any(pin.axis == axis for pin in pins_of(node))


def _is_narrowing_cast(user: Node, value: Node) -> bool:
    if str(user.target) != "prims.convert_element_type.default":
        return False
    return tensor_of(user).element_size() < tensor_of(value).element_size()
