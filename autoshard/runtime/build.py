"""Compile the program of a plan on all ranks of a mesh together; if one rank fails, all raise."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from autoshard.capture.garbage import uncollected
from autoshard.compile.compiled import Mode, Program, Split, compile_split, split_program
from autoshard.compile.overlap import OverlapPhase
from autoshard.compile.resized import resized
from autoshard.runtime.agreement import check_same_program, exchange, of_first, together
from autoshard.runtime.execution import LocalProgram
from autoshard.runtime.process_groups import MeshGroups, add_groups, axes_used
from autoshard.runtime.shared_memory import share_memory
from passes.base import Remark
from passes.cost.optimizer_step import OPTIMIZER_STATES
from passes.ir.graph import Origin, output_node, results_of


@dataclass(frozen=True)
class Built:
    program: Program
    groups: MeshGroups
    remarks: tuple[Remark, ...]


@dataclass(frozen=True)
class Partitioned:
    """An earlier program of the same module: its LOCAL graph, and how that was partitioned and ordered."""

    graph: GraphModule
    split: Split


def build_program(
    local: LocalProgram, groups: MeshGroups, *, mode: Mode, earlier: Sequence[Partitioned] = ()
) -> Built:
    """Partition, order and compile a program, and register the groups of its collectives.

    It is partitioned and ordered as one of the `earlier` ones, if its graph differs from that one in sizes only. Raises
    DistributedError if another rank failed or has another program.
    """
    overlap = of_first(groups, local.overlap)  # devices may report slightly different memory, which would give different orders
    split, remarks = together(groups, "partitioning", lambda: _split(local, overlap, earlier, mode=mode))
    if local.dump is not None:
        local.dump.compiled("forward", split.forward)
        if split.backward is not None:
            local.dump.compiled("backward", split.backward)
    graphs = (split.forward,) if split.backward is None else (split.forward, split.backward)
    check_same_program(groups, graphs)
    groups = add_groups(groups, axes_used(graphs, groups.mesh))
    if groups.device_mesh.device_type == "cuda":
        together(groups, "sharing memory", lambda: share_memory(graphs))
    return Built(_compile_by_host(split, groups, mode=mode), groups, remarks)


@uncollected()
def _split(
    local: LocalProgram, overlap: OverlapPhase | None, earlier: Sequence[Partitioned], *, mode: Mode
) -> tuple[Split, tuple[Remark, ...]]:
    for one in earlier:
        if _fits(local.graph, one.graph, overlap) and (split := resized(one.split, one.graph, local.graph)) is not None:
            text = "partitioned and ordered as an earlier program, whose graph differs in sizes only"
            return split, (Remark("partition", text, Origin(), output_node(local.graph.graph).name),)
    split = split_program(local.graph, mode=mode)
    return split, () if overlap is None else overlap.apply(split, mode=mode)


def _fits(now: GraphModule, before: GraphModule, overlap: OverlapPhase | None) -> bool:
    """Return whether the order of an earlier program surely needs no more memory than there is, in these sizes too."""
    if overlap is None or overlap.memory_limit is None:
        return True
    count = _bytes(now)
    return count <= _bytes(before) or count * (1 + OPTIMIZER_STATES[overlap.optimizer]) <= overlap.memory_limit


def _bytes(gm: GraphModule) -> int:
    """Return the bytes of all values of a graph."""
    nodes = (node for node in gm.graph.nodes if node.op != "output")
    return sum(tensor.numel() * tensor.element_size() for node in nodes for tensor in results_of(node))


def _compile_by_host(split: Split, groups: MeshGroups, *, mode: Mode) -> Program:
    """Compile on one rank of each host first; the others then find its code in Inductor's cache."""
    hosts = exchange(groups, socket.gethostname())
    mine = groups.mesh.ranks.index(groups.rank)
    leads = hosts.index(hosts[mine]) == mine
    first = together(groups, "compiling", lambda: compile_split(split, mode=mode) if leads else None)
    return together(groups, "compiling", lambda: first or compile_split(split, mode=mode))
