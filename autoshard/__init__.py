"""Distribute a PyTorch model written for one device over a mesh of devices, with the same results and an unchanged
model.

    from autoshard import autoshard, plan, Mesh, Options
"""

from __future__ import annotations

from autoshard.api import autoshard, plan
from autoshard.config.options import Bucket, Dump, Options, Overlap
from autoshard.debug.checking import check
from autoshard.inspection.assertions import assert_plan
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.plans.collectives import Collective
from autoshard.plans.outcome import Candidate, Cost, Memory, Recomputation, Search
from autoshard.plans.plan_values import Value
from autoshard.runtime.sharded_module import ShardedModule
from passes.base import Remark
from passes.errors import (
    AutoshardError,
    CaptureError,
    CompilerError,
    ConstraintError,
    DistributedError,
    InputError,
    MemoryLimitError,
    MeshError,
    PlanError,
    RecipeError,
    UnknownOpError,
    UserError,
)
from passes.hardware.hardware import Hardware
from passes.ir.graph import Origin
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.rules.rule import rule

__all__ = [
    "AutoshardError",
    "Bucket",
    "Candidate",
    "CaptureError",
    "Collective",
    "CompilerError",
    "ConstraintError",
    "Cost",
    "DistributedError",
    "Dump",
    "Hardware",
    "InputError",
    "Layout",
    "Memory",
    "MemoryLimitError",
    "Mesh",
    "MeshError",
    "Options",
    "Origin",
    "Overlap",
    "PlanError",
    "RecipeError",
    "Recomputation",
    "Remark",
    "Search",
    "ShardedModule",
    "ShardingPlan",
    "UnknownOpError",
    "UserError",
    "Value",
    "assert_plan",
    "autoshard",
    "check",
    "plan",
    "rule",
]
