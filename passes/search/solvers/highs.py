"""Build a mixed-integer program column by column and row by row, and solve it with HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from passes.search.model.factor_graph import Floats
from passes.search.model.memory_budget import MemoryBudget

MILLISECONDS = 1e3  # seconds to the unit of the objective: HiGHS's tolerances are absolute, and steps are 0.001 to 10 s
LEAST_NODES = 10  # of branch and bound without a time limit: the first few find solutions, the rest prove them
COLUMNS_TIMES_NODES = 400_000  # of branch and bound without a time limit; counted, not timed, so that all runs are alike
# Seconds that a program gets at most, so that all searches end. The largest that was solved (260,000 columns) took 12 s; others,
# of 80,000 and 180,000 columns in little memory, did not end in two minutes.
LONGEST = 30.0
# Where only the root of branch and bound is solved, for a solution. Presolve takes a few columns away, after which HiGHS spends
# most of its time on cuts that hardly raise the bound ("programs solved without presolve" in `benchmarks.ablation`).
PRESOLVE = "off"


@dataclass(frozen=True)
class Solved:
    """Values of the columns (None if none were found in time), the objective and the proven bound."""

    values: Floats | None
    objective: float
    bound: float
    is_infeasible: bool


@dataclass
class MixedIntegerProgram:
    """A program under construction: columns with costs and bounds from 0 up, rows with bounds on both sides."""

    costs: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0, upper: float = 1.0, *, integer: bool = False) -> int:
        """Add a column and return its number."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.costs) - 1

    def row(self, columns: Sequence[int], entries: Sequence[float], lower: float, upper: float) -> int:
        """Add a row and return its number."""
        number = len(self.row_lower)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self.rows += [number] * len(columns)
        self.columns += columns
        self.entries += entries
        return number

    def extend(self, row: int, column: int, entry: float) -> None:
        """Add an entry to a row."""
        self.rows.append(row)
        self.columns.append(column)
        self.entries.append(entry)

    def duals(self, *, time_limit: float | None = None) -> tuple[Floats, float] | None:
        """Return the duals of the rows of the linear relaxation and its objective, None if it is infeasible or not solved in
        time."""
        solver = _solver(time_limit)
        model = self._model()
        model.integrality_ = []
        solver.passModel(model)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return np.array(solver.getSolution().row_dual), float(solver.getInfo().objective_function_value)

    def minimise(self, *, gap: float, time_limit: float | None, nodes: int | None = None) -> Solved:
        """Solve to a relative `gap`, within the time limit or a number of branch-and-bound nodes; by default, one that
        suits the size."""
        solver = _solver(time_limit)
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("mip_abs_gap", 1e-9)
        if nodes == 1:
            solver.setOptionValue("presolve", PRESOLVE)
        if time_limit is None or nodes is not None:
            solver.setOptionValue("mip_max_nodes", nodes or max(LEAST_NODES, COLUMNS_TIMES_NODES // len(self.costs)))
        solver.passModel(self._model())
        solver.run()
        info, status = solver.getInfo(), solver.getModelStatus()
        values = np.array(solver.getSolution().col_value)
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return Solved(
            values if feasible else None,
            float(info.objective_function_value),
            float(info.mip_dual_bound) if any(self.integer) else float(info.objective_function_value),
            status == highspy.HighsModelStatus.kInfeasible,
        )

    def _model(self) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.costs), len(self.row_lower)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = np.array(self.costs), np.zeros(len(self.costs)), np.array(self.upper)
        lp.row_lower_, lp.row_upper_ = np.array(self.row_lower), np.array(self.row_upper)
        order = np.argsort(np.array(self.rows, dtype=np.int64), kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(self.rows, minlength=lp.num_row_))])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = starts.astype(np.int32)
        lp.a_matrix_.index_ = np.array(self.columns, dtype=np.int32)[order]
        lp.a_matrix_.value_ = np.array(self.entries)[order]
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[whole] for whole in self.integer]
        return lp


def _solver(time_limit: float | None) -> highspy.Highs:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        solver.setOptionValue(name, value)
    solver.setOptionValue("time_limit", LONGEST if time_limit is None else float(time_limit))
    return solver


def add_recomputation(program: MixedIntegerProgram, budget: MemoryBudget) -> list[int]:
    """Add the columns of recomputed bytes, in the budget's unit, and return them."""
    unit = budget.unit
    return [program.column(step.seconds * unit * MILLISECONDS, step.nbytes / unit) for step in budget.recomputation]
