"""Whether a sharded model computes what the model computes: on simulated ranks, value by value.

The program that ranks would run is run for all of them in this process; beside it runs the same program on whole
tensors, on which a collective does nothing. Values that differ are found where they are made, and the model itself is run
to see that what was captured is what it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule, Node

from autoshard.config.options import Options, options_given
from autoshard.config.settings import options_of
from autoshard.config.topology import mesh_of
from autoshard.config.validation import check_call, shown
from autoshard.debug.rounding import Rounding
from autoshard.debug.simulated_ranks import Call, Ranks, Step, Whole, distance, relative_error, run_on_one_device
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.planner.make_plan import Planned, make_plan
from autoshard.planner.request import PlanRequest
from passes._torch import OpOverload, flatten_pytree
from passes.base import Observer, Pass, PassContext
from passes.errors import InputError, PlanError, UserError
from passes.ir.collectives import is_step
from passes.ir.graph import (
    Origin,
    Stage,
    copy_graph,
    is_tensor,
    item_of,
    layout_given,
    layout_of,
    layouts_of,
    needs_of,
    operands,
    origin_of,
    results_of,
    stands_for,
    tensor_of,
)
from passes.ir.layout import Layout, assemble
from passes.ir.mesh import Mesh
from passes.ir.text import format_target

# By dtype, how far two correct results may be apart, relative to their norm:
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
SHOWN = 5  # results that are listed


@dataclass(frozen=True)
class Difference:
    """A value that the ranks have otherwise than one device. `row` is how each axis ran the call that made it."""

    value: str  # name of a node, or of an output or gradient
    error: float  # the norm of the difference over that of the value
    op: str = ""
    row: str = ""
    origin: Origin = field(default_factory=Origin)
    is_rounding: bool = False  # rounding alone may make it

    def __str__(self) -> str:
        place = f", {self.origin}" if str(self.origin) else ""
        source = f"\n  {self.origin.source.strip()}" if self.origin.source.strip() else ""
        row = f"\n  {self.row}" if self.row else ""
        return f"%{self.value} = {self.op} is off by {self.error:.1e}{place}{source}{row}"


@dataclass(frozen=True)
class Check:
    """What a check found; true where all is equal."""

    mesh: Mesh
    compared: int  # values of the program, beside its results
    first: Difference | None  # of the program's values, in the order of the program
    results: tuple[Difference, ...]  # outputs, gradients and new buffers that differ from the model's
    tolerance: float
    not_compared: str = ""  # why results were not compared with the model's
    rounded: int = 0  # values and results that differ by no more than rounding moves them

    def __bool__(self) -> bool:
        return self.first is None and not self.results

    def __str__(self) -> str:
        on = f"{self.mesh.size} simulated ranks ({self.mesh})"
        if self:
            own = f"the model's own were not compared: {self.not_compared}" if self.not_compared else "as are all results"
            lines = [f"equal on {on}", f"{self.compared} values are within {self.tolerance:.0e} of one device's; {own}"]
            moved = "off by more, but no further than a change in the last digit of parameters and inputs moves them"
            return "\n".join([*lines, f"{moved}: {self.rounded}"] if self.rounded else lines)
        lines = [f"not equal on {on}, to within {self.tolerance:.0e}:"]
        if self.first is not None:
            lines.append(f"the first value that differs: {self.first}")
        else:
            lines.append("the ranks do what was captured, but the model itself does something else")
        lines += [f"result {one.value} is off by {one.error:.1e}" for one in self.results[:SHOWN]]
        lines += [f"and {len(self.results) - SHOWN} more results"] if len(self.results) > SHOWN else []
        return "\n".join(lines)


def check(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: ShardingPlan | str | PathLike[str] | None = None,
    options: Options | None = None,
) -> Check:
    """Run `model` as it would be sharded on `mesh`, on simulated ranks in this process, and compare it with one device.

    `args` and `kwargs` are those of one call with the global batch; they and the model hold values. `plan` is a plan to
    follow. Forward and backward are run where gradients are enabled. Every value of the program is compared, and every
    output, gradient and new buffer with those of the model itself; with mixed precision, or where random numbers are
    drawn, the latter cannot be equal and are left out. What rounding alone moves as far is equal, and counted (`rounded`).
    Takes the memory of all values of a step, whole, and their parts.
    Raises InputError for a model or arguments on meta.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"autoshard.check takes an nn.Module, not {type(model).__name__}")
    check_call(args, kwargs)
    if plan is not None and not isinstance(plan, ShardingPlan | str | PathLike):
        raise PlanError(f"plan={shown(plan)}: give a ShardingPlan, or the path of a file that one was saved to")
    call = Call(model, tuple(args), kwargs or {})
    check_values(call)
    if plan is not None and not isinstance(plan, ShardingPlan):
        plan = ShardingPlan.load(plan)
    options = options_given(options) if options is not None or plan is None else options_of(plan.settings)
    keeper = Keeper()
    wanted, training = mesh_of(mesh, options.hardware), torch.is_grad_enabled()
    request = PlanRequest(model, call.args, call.kwargs, wanted, options, training=training)
    planned = make_plan(request, plan=plan, observers=(keeper,))
    precision = precision_of(call, options)
    return comparison(keeper.graph, planned, call, precision, is_exact=options.mixed_precision is None)


def comparison(
    explicit: GraphModule, planned: Planned, call: Call, precision: torch.dtype, *, is_exact: bool = True
) -> Check:
    """Check as `check` does, for a program that was planned; `explicit` is it with global shapes and collectives."""
    ranks, training, tolerance = Ranks.of(call, planned), torch.is_grad_enabled(), TOLERANCE[precision]
    watch = _Comparison(explicit, ranks, tolerance)
    results = ranks.run(watch=watch.compare)
    rounding = Rounding(call, precision, training, ranks, watch.drawn)
    values, found = watch.differences(rounding), tuple[Difference, ...]()
    why = "it draws random numbers" if watch.drawn else "" if is_exact else "it computes in another precision"
    if not why:
        found = tuple(differences(results.step, run_on_one_device(call, training=training), tolerance, rounding))
    return Check(
        planned.plan.mesh,
        watch.compared,
        next((one for one in values if not one.is_rounding), None),
        tuple(one for one in found if not one.is_rounding),
        tolerance,
        why,
        sum(one.is_rounding for one in (*values, *found)),
    )


def check_values(call: Call) -> None:
    """Raise InputError where something is on meta."""
    tensors = [*call.model.named_parameters(), *call.model.named_buffers()]
    leaves, _ = flatten_pytree((call.args, dict(call.kwargs)))
    tensors += [("an argument", leaf) for _, leaf in leaves if isinstance(leaf, Tensor)]
    for name, tensor in tensors:
        if tensor.is_meta:
            raise InputError(
                f"{name} is on meta: a check runs the model, so it needs values; give the model values (to_empty and your "
                "initialisation), and tensors as arguments"
            )


def precision_of(call: Call, options: Options) -> torch.dtype:
    """The dtype that is computed in, of several the one with the largest tolerance."""
    return max(_dtypes(call, options), key=TOLERANCE.__getitem__, default=torch.float32)


def _dtypes(call: Call, options: Options) -> list[torch.dtype]:
    dtypes = [p.dtype for p in call.model.parameters()]
    policy = options.mixed_precision
    dtypes += [dtype for dtype in (policy.param_dtype, policy.reduce_dtype) if dtype] if policy else []
    return [dtype for dtype in dict.fromkeys(dtypes) if dtype in TOLERANCE]


@dataclass
class Keeper(Observer):
    """A copy of the program while its shapes are global and its collectives are in it."""

    kept: GraphModule | None = None

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        """Nothing to keep yet."""

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        if pass_.gives is Stage.COLLECTIVE:
            self.kept = copy_graph(gm)

    @property
    def graph(self) -> GraphModule:
        assert self.kept is not None, "every pipeline gives a COLLECTIVE graph"
        return self.kept


class _Comparison:
    """Runs the program on whole tensors, and compares what ranks give with it.

    What the ranks draw at random is taken from them.
    """

    def __init__(self, gm: GraphModule, ranks: Ranks, tolerance: float) -> None:
        self.gm, self.mesh, self.tolerance = gm, ranks.mesh, tolerance
        self.nodes = {node.name: node for node in gm.graph.nodes}
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.whole = Whole(ranks)
        self.wrong: dict[Node, tuple[float, float]] = {}  # distance, and in parts of the value
        self.compared = 0

    @property
    def drawn(self) -> dict[Node, Any]:
        """Return what the ranks drew at random."""
        return {node: value for node, value in self.whole.values.items() if is_random(node)}

    def compare(self, local: Node, parts: Sequence[Any]) -> None:
        for name in stands_for(local):
            node = self.nodes[name]
            if is_random(node):
                self.whole.values[node] = self._assembled(node, parts)
            elif is_tensor(node):
                self.compared += 1
                got, want = self._assembled(node, parts), self.whole.value(node)
                if not is_equal(got, want, self.tolerance):
                    self.wrong[node] = distance(got, want), relative_error(got, want)

    def differences(self, rounding: Rounding) -> tuple[Difference, ...]:
        """In the order of the program: what the first is made of is not wrong."""
        return tuple(self._difference(node, rounding) for node in sorted(self.wrong, key=self.order.__getitem__))

    def _assembled(self, node: Node, parts: Sequence[Any]) -> Any:
        if not is_tensor(node):
            shapes = [tuple(tensor.shape) for tensor in results_of(node)]
            each = [_tensors(part) for part in parts]
            whole = [
                assemble([part[i] for part in each], shape, layouts_of(node)[i], self.mesh) for i, shape in enumerate(shapes)
            ]
            return tuple(whole)
        return assemble(list(parts), tuple(tensor_of(node).shape), layout_of(node), self.mesh)

    def _difference(self, node: Node, rounding: Rounding) -> Difference:
        far, error = self.wrong[node]
        rows = [f"on {name}: {_row(node, axis)}" for axis, name in enumerate(self.mesh.names) if self.mesh.sizes[axis] > 1]
        what = f"the collective {format_target(node.target)}" if is_step(node) else f"the rule of {format_target(node.target)}"
        row = f"{what} {'; '.join(rows)}"
        is_rounding = far <= rounding.of_value(node, self.whole.value(node))
        return Difference(node.name, error, format_target(node.target), row, origin_of(node), is_rounding)


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, tuple | list) else [value]


def is_random(node: Node) -> bool:
    """Return whether a call draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_equal(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Whole numbers have to be the same."""
    is_whole = not (want.is_floating_point() or want.is_complex())
    return torch.equal(got, want) if is_whole else relative_error(got, want) <= tolerance


def _row(node: Node, axis: int) -> str:
    """`S(0), R -> S(0)`: the placements on one axis of what a call is given and of what it gives."""
    if (item := item_of(node)) is not None:
        node = item[0]
    given: list[Layout] = [layout_given(node, value) for value in operands(node)] if is_step(node) else list(needs_of(node))
    return f"{', '.join(str(one.on(axis)) for one in given)} -> {', '.join(str(one.on(axis)) for one in layouts_of(node))}"


def differences(got: Step, want: Step, tolerance: float, rounding: Rounding) -> Iterator[Difference]:
    """The results of a step that are not those of another."""
    changed = {name: want.buffers[name] for name in got.buffers}
    kinds = (
        ("outputs", got.outputs, want.outputs),
        ("gradients", got.gradients, want.gradients),
        ("buffers", got.buffers, changed),
    )
    for kind, mine, theirs in kinds:
        what = kind.removesuffix("s")
        yield from (Difference(f"{what} {name}", float("inf")) for name in sorted(mine.keys() ^ theirs.keys()))
        for name in (name for name in mine if name in theirs):
            one, other = mine[name], theirs[name]
            if not is_equal(one, other, tolerance):
                is_rounding = distance(one, other) <= rounding.of_result(kind, name, other)
                yield Difference(f"{what} {name}", relative_error(one, other), is_rounding=is_rounding)
