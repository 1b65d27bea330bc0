"""One training step of a test model on all ranks of a mesh, in one process, compared with the same step on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autoshard.config.constraints import check_options
from autoshard.config.options import Options
from autoshard.config.topology import equipped
from autoshard.debug import simulated_ranks as simulation
from autoshard.debug.simulated_ranks import SEED, Call, Ranks, Results, Step, distance, norm_of, tangent
from autoshard.planner.make_plan import make_plan, program_problem
from autoshard.planner.problem import Problem, captured_problem
from autoshard.planner.request import PlanRequest
from passes.ir.mesh import Mesh
from tests.models import Case

__all__ = ["NOISE", "SEED", "Ranks", "Results", "Step", "relative_error", "tangent"]

NOISE = 1e-5  # of the largest norm of its kind: what is smaller is zero but for rounding, and measured by this
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative to a tensor's norm


def plan_ranks(case: Case, mesh: str | Mesh, options: Options | None = None, *, training: bool = True) -> Ranks:
    """Plan `case` for simulated ranks, each with its part of the parameters and buffers."""
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    planned = make_plan(PlanRequest(case.model, case.args, case.kwargs, mesh, options or Options(), training=training))
    return Ranks.of(Call(*case), planned)


def run_on_ranks(case: Case, mesh: str | Mesh, options: Options | None = None, *, training: bool = True) -> Step:
    """Run one step of `case` on simulated ranks, or one forward without `training`."""
    return plan_ranks(case, mesh, options, training=training).run().step


def run_on_one_device(case: Case, *, training: bool = True) -> Step:
    """Run one step of the model itself, or one forward without `training`; `case` is left as it is."""
    return simulation.run_on_one_device(Call(*case), training=training)


@dataclass(frozen=True)
class Reference:
    """A case that was captured and run on one device once, to be compared with on many meshes."""

    case: Case
    problem: Problem
    step: Step

    @staticmethod
    def of(case: Case) -> Reference:
        mesh, how = Mesh("dp=1"), {"training": True, "device": "cpu"}
        return Reference(case, captured_problem(PlanRequest(*case, mesh, Options(), **how)), run_on_one_device(case))

    def plan(self, mesh: str | Mesh, options: Options | None = None) -> Ranks:
        """Plan as `plan_ranks` does; `options` are none that the capture depends on."""
        options = options or Options()
        assert options.mixed_precision is None, "captured with it"
        mesh = equipped(Mesh(mesh) if isinstance(mesh, str) else mesh, options.hardware, "cpu")
        check_options(options, mesh)
        planned = program_problem(replace(self.problem, mesh=mesh, options=options))
        return Ranks.of(Call(*self.case), planned)

    def check(self, mesh: str | Mesh, options: Options | None = None) -> Ranks:
        """Check as `check_step` does."""
        ranks = self.plan(mesh, options)
        dtype = next(self.case.model.parameters()).dtype
        compare(ranks.run().step, self.step, TOLERANCE[dtype])
        return ranks


def check_step(case: Case, mesh: str | Mesh, options: Options | None = None) -> Ranks:
    """Check that one step of `case` on `mesh` equals that on one device. Return the ranks, to ask more of them."""
    return Reference.of(case).check(mesh, options)


def compare(got: Step, want: Step, tolerance: float) -> None:
    """Raise AssertionError that names every tensor that is off by more than `tolerance`, relative to its norm."""
    changed = {name: want.buffers[name] for name in got.buffers}
    wrong = [
        *_differences("output", got.outputs, want.outputs, tolerance),
        *_differences("gradient", got.gradients, want.gradients, tolerance),
        *_differences("buffer", got.buffers, changed, tolerance),
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def _differences(what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float) -> Iterator[str]:
    if got.keys() != want.keys():
        yield f"{what}s on one side only: {sorted(got.keys() ^ want.keys())}"
        return
    largest = max((norm_of(tensor) for tensor in want.values() if tensor.is_floating_point()), default=0.0)
    for name, tensor in want.items():
        if got[name].shape != tensor.shape or got[name].dtype != tensor.dtype:
            yield f"{what} {name}: {got[name].dtype}{list(got[name].shape)}, not {tensor.dtype}{list(tensor.shape)}"
        elif not tensor.is_floating_point():
            if not torch.equal(got[name], tensor):
                yield f"{what} {name} differs"
        elif (error := relative_error(got[name], tensor, NOISE * largest)) > tolerance:
            yield f"{what} {name} is off by {error:.1e}"


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference over that of `want`, or over `floor` if that is larger."""
    error = distance(got, want)
    return error / max(norm_of(want), floor) if error else 0.0
