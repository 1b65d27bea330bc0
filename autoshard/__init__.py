"""Distribute a PyTorch model written for one device over a mesh of devices, with the same results and an unchanged
model.

    from autoshard import autoshard, plan, Mesh, Options

Each name is imported at its first use, so that `import autoshard` costs little more than torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOME = {
    "autoshard": "autoshard.api",
    "plan": "autoshard.api",
    "Bucket": "autoshard.config.options",
    "Dump": "autoshard.config.options",
    "Options": "autoshard.config.options",
    "Overlap": "autoshard.config.options",
    "check": "autoshard.debug.checking",
    "assert_plan": "autoshard.inspection.assertions",
    "ShardingPlan": "autoshard.inspection.sharding_plan",
    "Collective": "autoshard.plans.collectives",
    "Candidate": "autoshard.plans.outcome",
    "Cost": "autoshard.plans.outcome",
    "Memory": "autoshard.plans.outcome",
    "Recomputation": "autoshard.plans.outcome",
    "Search": "autoshard.plans.outcome",
    "Value": "autoshard.plans.plan_values",
    "ShardedModule": "autoshard.runtime.sharded_module",
    "Remark": "passes.base",
    "AutoshardError": "passes.errors",
    "CaptureError": "passes.errors",
    "CompilerError": "passes.errors",
    "ConstraintError": "passes.errors",
    "DistributedError": "passes.errors",
    "InputError": "passes.errors",
    "MemoryLimitError": "passes.errors",
    "MeshError": "passes.errors",
    "PlanError": "passes.errors",
    "RecipeError": "passes.errors",
    "UnknownOpError": "passes.errors",
    "UserError": "passes.errors",
    "Hardware": "passes.hardware.hardware",
    "Origin": "passes.ir.graph",
    "Layout": "passes.ir.layout",
    "Mesh": "passes.ir.mesh",
    "rule": "passes.rules.rule",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
