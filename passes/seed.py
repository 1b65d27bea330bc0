"""Write what the user and the recipes insist on into the graph, as pins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from passes.base import Pass, PassContext
from passes.ir.graph import (
    InputRole,
    OutputRole,
    Pin,
    Stage,
    add_pin,
    add_reshard,
    input_of,
    is_reshard,
    origin_of,
    output_node,
    outputs_of,
    pins_of,
    placeholders,
    returned,
    set_origin,
    set_recompute,
    tensor_of,
)
from passes.ir.layout import Layout, Placement, R, Shard, is_storable, replicated
from passes.recipes.data import DATA_RECIPES, SHARDED_RECIPES, next_digit, stored_on
from passes.recipes.megatron import TensorParallel, tensor_parallel


@dataclass(frozen=True)
class Insisted:
    """A placement that the user insists on: of a parameter (FQN), an input or an output (path)."""

    name: str
    axis: str
    placement: Placement


@dataclass(frozen=True)
class Seed(Pass):
    """Pin parameters, inputs, outputs and values as constraints and recipes ask.

    1. The user's constraints come first; no recipe overrides one.
    2. `megatron` on an axis shards linears and embeddings, and pins what lies between blocks.
    3. `ddp`, `zero2`, `fsdp` on an axis split the batch: dim 0 of every input whose dim 0 is as long as that of
       the first input.
    4. `zero2` and `fsdp` store parameters (and so gradients) sharded, and gather them before use; `fsdp`
       gathers again in the backward. The gather stands behind a cast to fewer bytes.

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
    params: tuple[Insisted, ...] = ()
    inputs: tuple[Insisted, ...] = ()
    outputs: tuple[Insisted, ...] = ()
    stored: tuple[tuple[str, Layout], ...] = ()  # parameters that are stored already, by FQN

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        seeds = _Seeds(self, gm, ctx)
        seeds.keep()
        seeds.insist()
        seeds.tensor_parallel()
        seeds.split_batch()
        seeds.store()
        return True


class _Seeds:
    """The layouts that placeholders are pinned to, while they grow axis by axis."""

    def __init__(self, seed: Seed, gm: GraphModule, ctx: PassContext) -> None:
        self.seed, self.gm, self.ctx, self.mesh = seed, gm, ctx, ctx.mesh
        self.layouts = {node: replicated(ctx.mesh) for node in placeholders(gm.graph)}

    def axes(self, *recipes: str) -> tuple[int, ...]:
        """Axes of more than one rank with one of these recipes."""
        named = enumerate(zip(self.seed.recipes, self.mesh.sizes, strict=False))
        return tuple(axis for axis, (recipe, size) in named if recipe in recipes and size > 1)

    def pin(self, node: Node, axis: int, placement: Placement, reason: str) -> None:
        if any(pin.axis == axis for pin in pins_of(node)):
            return
        add_pin(node, Pin(axis, placement, reason))
        if node in self.layouts:
            self.layouts[node] = self.layouts[node].with_on(axis, placement)

    def keep(self) -> None:
        """Parameters that an earlier program stored stay as they are."""
        stored = dict(self.seed.stored)
        for node in placeholders(self.gm.graph, InputRole.PARAMETER):
            if (layout := stored.get(input_of(node).name)) is not None:
                for axis, placement in enumerate(layout.placements):
                    self.pin(node, axis, placement, "stored already")

    def insist(self) -> None:
        for role, insisted in ((InputRole.PARAMETER, self.seed.params), (InputRole.INPUT, self.seed.inputs)):
            nodes = {input_of(node).name: node for node in placeholders(self.gm.graph, role)}
            for one in insisted:
                self._insist(nodes[one.name], one)
        values = list(returned(self.gm.graph))
        for position, output in enumerate(outputs_of(self.gm.graph)):
            pins = [one for one in self.seed.outputs if output.role is OutputRole.OUTPUT and output.name == one.name]
            if pins and isinstance(values[position], Node):
                values[position] = self._pin_returned(values[position], pins)
        output_node(self.gm.graph).args = (tuple(values),)

    def _insist(self, node: Node, one: Insisted) -> None:
        axis, placement = self.mesh.index(one.axis), one.placement
        if self.mesh.sizes[axis] == 1:
            return
        if isinstance(placement, Shard) and placement.outer == 1:
            placement = next_digit(self.layouts[node], placement.dim, self.mesh)
        self.pin(node, axis, placement, "options")

    def _pin_returned(self, value: Node, pins: list[Insisted]) -> Node:
        new = add_reshard(value, "seed: options: output")
        for one in pins:
            add_pin(new, Pin(self.mesh.index(one.axis), one.placement, "options"))
        return new

    def tensor_parallel(self) -> None:
        data_digits = math.prod(self.mesh.sizes[axis] for axis in self.axes(*DATA_RECIPES))
        for axis in self.axes("megatron"):
            self._apply(tensor_parallel(self.gm, self.mesh, axis, data_digits), axis)
            data_digits *= self.mesh.sizes[axis]

    def _apply(self, decided: TensorParallel, axis: int) -> None:
        nodes = {input_of(node).name: node for node in placeholders(self.gm.graph, InputRole.PARAMETER)}
        for node, text in decided.remarks:
            self.ctx.remark(self.seed, node, f"on {self.mesh.names[axis]}: {text}")
        for name, (placement, reason) in decided.parameters.items():
            node = nodes[name]
            if isinstance(placement, Shard) and not self._is_storable(node, axis, placement):
                placement = next_digit(self.layouts[node], placement.dim, self.mesh)
                if not self._is_storable(node, axis, placement):
                    text = f"{name}{list(tensor_of(node).shape)} is not sharded: nothing of dim {placement.dim} is left to split"
                    self.ctx.remark(self.seed, node, f"on {self.mesh.names[axis]}: {text}")
                    continue
            self.pin(node, axis, placement, reason)
        for node, (placement, reason) in decided.pins.items():
            self._pin_value(node, axis, placement, reason)

    def _is_storable(self, node: Node, axis: int, placement: Placement) -> bool:
        return is_storable(self.layouts[node].with_on(axis, placement), tensor_of(node).shape, self.mesh)

    def _pin_value(self, node: Node, axis: int, placement: Placement, reason: str) -> None:
        users = list(node.users)
        new = users[0] if len(users) == 1 and is_reshard(users[0]) else add_reshard(node, f"seed: {reason}")
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.pin(new, axis, placement, reason)

    def split_batch(self) -> None:
        inputs = [n for n in placeholders(self.gm.graph, InputRole.INPUT) if tensor_of(n).dim() > 0]
        if not inputs:
            return
        batch = tensor_of(inputs[0]).shape[0]
        for axis in self.axes(*DATA_RECIPES):
            for node in inputs:
                if tensor_of(node).shape[0] == batch:
                    digit = next_digit(self.layouts[node], 0, self.mesh)
                    self.pin(node, axis, digit, f"{self.seed.recipes[axis]}: batch")

    def store(self) -> None:
        sharded = self.axes(*SHARDED_RECIPES)
        if not sharded:
            return
        for node in placeholders(self.gm.graph, InputRole.PARAMETER):
            gathered = [axis for axis in sharded if self._store(node, axis)]
            if gathered and node.users:
                self._gather(node, gathered)

    def _store(self, node: Node, axis: int) -> bool:
        recipe = self.seed.recipes[axis]
        shape = tuple(tensor_of(node).shape)
        if any(pin.axis == axis for pin in pins_of(node)):
            return True
        placement = stored_on(self.layouts[node], axis, shape, self.mesh)
        if placement is None:
            self.ctx.remark(self.seed, node, f"{input_of(node).name}{list(shape)} is not sharded: no dim can be split")
            return False
        self.pin(node, axis, placement, f"{recipe}: stored sharded")
        return True

    def _gather(self, node: Node, axes: list[int]) -> None:
        value = node
        while len(value.users) == 1 and _is_narrowing_cast(user := next(iter(value.users)), value):
            value = user
        new = add_reshard(value, f"seed: {self.seed.recipes[axes[0]]}: gathered for use")
        value.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and user.op != "output")
        if new.users:
            set_origin(new, origin_of(next(iter(new.users))))
        for axis in axes:
            add_pin(new, Pin(axis, R, f"{self.seed.recipes[axis]}: gathered for use"))
        set_recompute(new, all(self.seed.recipes[axis] == "fsdp" for axis in axes))


def _is_narrowing_cast(user: Node, value: Node) -> bool:
    if str(user.target) != "prims.convert_element_type.default":
        return False
    return tensor_of(user).element_size() < tensor_of(value).element_size()
