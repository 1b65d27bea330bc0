"""Decide tensor and sequence parallelism on one axis, as Megatron-LM does it.

Shoeybi et al. 2019 (column- then row-parallel linears, vocabulary-parallel embedding and loss) and
Korthikanti et al. 2022 (values between blocks are sharded on the sequence).

Linears are visited in program order. One whose input already carries a sharding of the contracted factor is
row-parallel; any other is column-parallel, and the sharding of its result is carried on by the rules, through
activation functions, heads, attention and the loss. If an op cannot carry it on, the linears that it came from try
another digit (a fused projection is sharded inside each of its parts), and then stay whole: every rank makes the products
of its part of the sequence with the whole weight, which is stored in parts and gathered for use.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from passes.ir.graph import input_of, operands, origin_of, tensor_of
from passes.ir.layout import R, Shard
from passes.ir.text import format_target
from passes.recipes.megatron.carry import Carry, carry_shardings
from passes.recipes.megatron.linears import Linear, find_linears, forward_nodes
from passes.recipes.megatron.stream import depends_on_input, stream_placement
from passes.recipes.recipe import Decision, Decisions, Recipe, Site
from passes.recipes.weights import on_parameter, weights_of

aten = torch.ops.aten


def tensor_parallel(site: Site) -> Decisions:
    """Decide the axis of `site`: linears, embeddings and the values between blocks."""
    weights, forward = weights_of(site.gm.graph), forward_nodes(site.gm)
    carry = carry_shardings(forward, find_linears(forward, weights), weights, site.size)
    parameters = dict(_linear_parameters(carry))
    values: dict[Node, Decision] = {}
    remarks: list[tuple[Node, str]] = []
    whole: list[str] = []
    for node in forward:
        if node.target is aten.embedding.default:
            _shard_table(node, carry, parameters, remarks)
    for value, placement in carry.stored.moved.items():
        values[value] = Decision(placement, "megatron: parts of a parameter, as it is used")
    for node in forward:
        if node in carry.rows and node in carry.ways.scattered:
            scattered = Shard(carry.linears[node].column_dim)
            values[node] = Decision(scattered, "megatron: row-parallel output, scattered over channels")
        elif node in carry.rows:
            _pin_stream(node, "row-parallel output", site, values, remarks)
        elif node.target is aten.embedding.default and depends_on_input(operands(node)[1]):
            _pin_stream(node, "embedding", site, values, remarks)
    for value in carry.gathered:
        values[value] = Decision(R, "megatron: gathered for a weight that is sharded by columns")
    for node, linear in carry.linears.items():
        if node not in carry.columns and node not in carry.rows:
            remarks.append((node, f"{_weight_name(linear, carry)} stays whole: {_why_whole(linear, carry)}"))
            if node not in carry.ways.adapters:
                whole.append(_weight_name(linear, carry))
            if any(carry.linears[other].x is linear.x for other in carry.columns):
                values[node] = Decision(R, "megatron: whole beside column-parallel linears")
    return Decisions(parameters, values, tuple(remarks), gathered=frozenset(whole).difference(parameters))


def _linear_parameters(carry: Carry) -> Iterator[tuple[str, Decision]]:
    for parameter, (placement, by) in carry.stored.placed.items():
        role = "column" if by in carry.columns else "row" if by in carry.rows else "with its column"
        yield input_of(parameter).name, Decision(placement, f"megatron: {role}-parallel")


def _shard_table(node: Node, carry: Carry, parameters: dict[str, Decision], remarks: list[tuple[Node, str]]) -> None:
    """Shard the rows of an embedding table that inputs index."""
    table, index = operands(node)
    if table not in carry.weights or not depends_on_input(index):
        return
    name, rows = input_of(carry.weights[table]).name, tensor_of(table).shape[0]
    if rows % carry.size:
        remarks.append((node, f"{name}: {rows} rows do not divide by {carry.size}; not sharded"))
        return
    wanted = on_parameter(table, Shard(0), carry.weights, carry.size)
    if wanted is not None:
        parameters.setdefault(name, Decision(wanted, "megatron: vocabulary-parallel"))


def _pin_stream(
    node: Node, what: str, site: Site, values: dict[Node, Decision], remarks: list[tuple[Node, str]]
) -> None:
    placement = stream_placement(node, site.batch_parts, site.size)
    if placement is None:
        text = f"{what} is not sequence-parallel: neither sequence nor batch divides by {site.size}"
        remarks.append((node, text))
    values[node] = Decision(placement or R, f"megatron: {what}")


def _weight_name(linear: Linear, carry: Carry) -> str:
    return input_of(carry.weights[linear.w]).name


def _why_whole(linear: Linear, carry: Carry) -> str:
    """Return why a linear is sharded neither by columns nor by rows."""
    if linear.column_count % carry.size:
        return f"its {linear.column_count} columns do not divide by {carry.size}"
    if (adapted := carry.ways.adapters.get(linear.node)) is not None:
        return f"its {linear.column_count} columns are the rank of an adapter, which {_at(adapted)} adds to a sharded linear"
    if (blocker := carry.ways.blockers.get(linear.node)) is not None:
        return f"its columns cannot be sharded past {_at(blocker)}"
    return "its columns cannot be sharded through to a row"


def _at(node: Node) -> str:
    """Return an op and its place, as graphs write them: `sort, model.py:9 layers.0`."""
    op = format_target(node.target)
    return f"{op}, {origin_of(node)}" if str(origin_of(node)) else op


MEGATRON = Recipe(
    "megatron",
    "linears by columns, then by rows; tables by rows; what lies between blocks on the sequence",
    decide=tensor_parallel,
)
