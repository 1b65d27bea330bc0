"""The kinds of collectives and local steps, one module each; `kind.py` defines the entry of a kind."""

from passes.ir.collectives.all_gather import ALL_GATHER, all_gather
from passes.ir.collectives.all_reduce import ALL_REDUCE, all_reduce
from passes.ir.collectives.all_to_all import ALL_TO_ALL, all_to_all
from passes.ir.collectives.formulas import Where
from passes.ir.collectives.kind import (
    KINDS,
    Fabric,
    Kind,
    Simulated,
    Step,
    is_collective,
    is_step,
    kind_between,
    kind_of_op,
    kind_of_step,
    register,
    step_axes,
    step_kind,
    unregister,
)
from passes.ir.collectives.local_steps import TAKE_PART, TAKE_TERM, take_part, take_term
from passes.ir.collectives.lowering import Emitter, StepCall
from passes.ir.collectives.reduce_scatter import REDUCE_SCATTER, reduce_scatter
from passes.ir.collectives.send import SEND, send

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "Emitter",
    "Fabric",
    "KINDS",
    "Kind",
    "REDUCE_SCATTER",
    "SEND",
    "Simulated",
    "Step",
    "StepCall",
    "TAKE_PART",
    "TAKE_TERM",
    "Where",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "is_collective",
    "is_step",
    "kind_between",
    "kind_of_op",
    "kind_of_step",
    "reduce_scatter",
    "register",
    "send",
    "step_axes",
    "step_kind",
    "take_part",
    "take_term",
    "unregister",
]
