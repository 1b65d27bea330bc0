"""Compile the program of a plan on all ranks of a mesh together; if one rank fails, all raise."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from autoshard.capture.garbage import uncollected
from autoshard.compile.compiled import Mode, Program, Split, compile_split, split_program
from autoshard.compile.overlap import OverlapPhase
from autoshard.runtime.agreement import check_same_program, exchange, of_first, together
from autoshard.runtime.execution import LocalProgram
from autoshard.runtime.process_groups import MeshGroups, add_groups, axes_used
from autoshard.runtime.shared_memory import share_memory
from passes.base import Remark


@dataclass(frozen=True)
class Built:
    program: Program
    groups: MeshGroups
    remarks: tuple[Remark, ...]


def build_program(local: LocalProgram, groups: MeshGroups, *, mode: Mode) -> Built:
    """Partition, order and compile a program, and register the groups of its collectives.

    Raises DistributedError if another rank failed or has another program.
    """
    overlap = of_first(groups, local.overlap)  # devices may report slightly different memory, which would give different orders
    split, remarks = together(groups, "partitioning", lambda: _split(local, overlap, mode=mode))
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
def _split(local: LocalProgram, overlap: OverlapPhase | None, *, mode: Mode) -> tuple[Split, tuple[Remark, ...]]:
    split = split_program(local.graph, mode=mode)
    return split, () if overlap is None else overlap.apply(split, mode=mode)


def _compile_by_host(split: Split, groups: MeshGroups, *, mode: Mode) -> Program:
    """Compile on one rank of each host first; the others then find its code in Inductor's cache."""
    hosts = exchange(groups, socket.gethostname())
    mine = groups.mesh.ranks.index(groups.rank)
    leads = hosts.index(hosts[mine]) == mine
    first = together(groups, "compiling", lambda: compile_split(split, mode=mode) if leads else None)
    return together(groups, "compiling", lambda: first or compile_split(split, mode=mode))
