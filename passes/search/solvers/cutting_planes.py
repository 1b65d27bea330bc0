"""Find the multipliers with the highest bound given the assignments seen so far (Kelley's cutting planes).

Each assignment is a cut: it bounds the dual function from above. The multipliers are the duals of the linear program
that mixes the assignments (Kelley, "The Cutting-Plane Method for Solving Convex Programs", 1960).
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.search.model.memory_budget import MemoryBudget
from passes.search.solvers.evaluate import Assignment
from passes.search.solvers.highs import MILLISECONDS, MixedIntegerProgram, add_recomputation
from passes.search.solvers.multipliers import Multipliers, weights_of

SHORTFALL = 4.0  # steps that being over the limit by all of it costs: keeps the price of a byte finite where no mix fits


def best_multipliers(assignments: Sequence[Assignment], budget: MemoryBudget | None) -> Multipliers:
    """Return multipliers under which the cheapest of `assignments` costs most."""
    program = MixedIntegerProgram()
    parts = [program.column() for _ in assignments]
    program.row(parts, [1.0] * len(parts), 1.0, 1.0)
    segments = []
    for segment in range(len(assignments[0].loads)):
        time = program.column(MILLISECONDS, float("inf"))
        segments.append(
            [
                program.row([time, *parts], [1.0, *(-float(a.loads[segment, what]) for a in assignments)], 0.0, float("inf"))
                for what in range(assignments[0].loads.shape[1])
            ]
        )
    byte_row, unit = -1, 1.0 if budget is None else budget.unit
    if budget is not None:
        least = min(assignment.objective for assignment in assignments)
        over = program.column(SHORTFALL * least / budget.most * unit * MILLISECONDS, float("inf"))
        freed = [over, *add_recomputation(program, budget)]
        nbytes = [-assignment.memory / unit for assignment in assignments]
        byte_row = program.row([*freed, *parts], [*(1.0 for _ in freed), *nbytes], -budget.limit / unit, float("inf"))
    duals = program.duals()
    assert duals is not None, "every assignment is a feasible point"
    byte = max(0.0, float(duals[byte_row])) / MILLISECONDS / unit if byte_row >= 0 else 0.0
    return Multipliers(tuple(weights_of(duals, rows) for rows in segments), byte)
