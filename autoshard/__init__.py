"""Train a model written for one device on a mesh of many: same numbers, no change to the model.

    from autoshard import autoshard, plan, Mesh, Options
"""

from __future__ import annotations

from autoshard.api import autoshard, plan
from autoshard.config.options import Options
from autoshard.debug.checking import check
from autoshard.inspection.assertions import assert_plan
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.runtime.sharded_module import ShardedModule
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
from passes.ir.mesh import Mesh
from passes.rules.rule import rule

__all__ = [
    "AutoshardError",
    "CaptureError",
    "CompilerError",
    "ConstraintError",
    "DistributedError",
    "InputError",
    "MemoryLimitError",
    "Mesh",
    "MeshError",
    "Options",
    "PlanError",
    "RecipeError",
    "ShardedModule",
    "ShardingPlan",
    "UnknownOpError",
    "UserError",
    "assert_plan",
    "autoshard",
    "check",
    "plan",
    "rule",
]
