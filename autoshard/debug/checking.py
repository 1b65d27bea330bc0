"""Compare a sharded model with the model itself, on simulated ranks, value by value.

The program that ranks would run is run for all of them in this process; beside it runs the same program on whole
tensors, on which a collective does nothing. Values that differ are found where they are made, and the model itself is run
to see that what was captured is what it does. At last the program is run partitioned and
reordered, without Inductor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from autoshard.debug.overlapped_run import run_overlapped
from autoshard.debug.random_draws import RESULTS_OF_DRAWS, Draws, ReplayError
from autoshard.debug.rounding import Rounding
from autoshard.debug.simulated_ranks import (
    Call,
    Ranks,
    Step,
    Whole,
    copies_apart,
    distance,
    norm_of,
    relative_error,
    run_on_one_device,
)
from autoshard.debug.unwritten_memory import filled, is_unwritten
from autoshard.inspection.sharding_plan import ShardingPlan
from autoshard.planner.make_plan import Planned, make_plan
from autoshard.planner.request import PlanRequest
from passes._torch import OpOverload, flatten_pytree
from passes.base import Observer, Pass, PassContext
from passes.errors import InputError, PlanError, UserError
from passes.ir.collectives import is_step
from passes.ir.graph import (
    Origin,
    Output,
    OutputRole,
    Stage,
    copy_graph,
    draw_of,
    is_random,
    is_tensor,
    item_of,
    layout_given,
    layout_of,
    layouts_of,
    needs_of,
    operands,
    origin_of,
    outputs_of,
    results_of,
    returned,
    stands_for,
    tensor_of,
)
from passes.ir.layout import Layout, assemble
from passes.ir.mesh import Mesh
from passes.ir.text import format_target

# By dtype, how far two correct results may be apart, relative to their norm:
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
SHOWN = 5  # results that are listed

aten = torch.ops.aten
_COMPARISONS = {
    getattr(getattr(aten, name), form) for name in ("eq", "ne", "lt", "le", "gt", "ge") for form in ("Scalar", "Tensor")
}


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
    """The findings of a check, and what it compared; true if all of that is equal."""

    mesh: Mesh
    compared: int  # values of the program, beside its results
    first: Difference | None  # of the program's values, in the order of the program
    results: tuple[Difference, ...]  # outputs, gradients and buffers that differ from the model's
    tolerance: float
    not_compared: str = ""  # why results were not compared with the model's
    rounded: int = 0  # values and results that differ by no more than rounding moves them
    left_out: Mapping[str, int] = field(default_factory=dict)  # values that were not compared: why, and how many
    results_compared: int = 0  # with the model's
    overlapped: tuple[Difference, ...] = ()  # results that differ once communication is overlapped, from those before

    def __bool__(self) -> bool:
        return self.first is None and not self.results and not self.overlapped

    def __str__(self) -> str:
        on = f"{self.mesh.size} simulated ranks ({self.mesh})"
        return "\n".join([*(self._equal(on) if self else self._unequal(on)), *self._left_out()])

    def _equal(self, on: str) -> list[str]:
        within = f"{self.compared} values are within {self.tolerance:.0e} of one device's"
        lines = [f"equal on {on}", within if self.not_compared else f"{within}, as are {self._count} of the model"]
        lines += ["results stay the same after the partition and the passes of overlap"]
        moved = "off by more, but no further than a change in the last digit of numbers moves them"
        return [*lines, f"{moved}: {self.rounded}"] if self.rounded else lines

    def _unequal(self, on: str) -> list[str]:
        lines = [f"not equal on {on}, to within {self.tolerance:.0e}:"]
        if self.first is not None:
            lines.append(f"the first value that differs: {self.first}")
        elif self.results:
            lines.append("the ranks do what was captured, but the model itself does something else")
        lines += _listed(self.results)
        if self.overlapped:
            ask = "`python -m autoshard bisect` names the pass"
            lines.append(f"results change after the partition and the passes of overlap; {ask}")
            lines += _listed(self.overlapped)
        return lines

    @property
    def _count(self) -> str:
        return f"{self.results_compared} result{'s' if self.results_compared != 1 else ''}"

    def _left_out(self) -> list[str]:
        """Say what was not seen."""
        lines = []
        if self.left_out:
            counts = ", ".join(f"{count} {why}" for why, count in self.left_out.items())
            lines.append(f"values not compared: {counts}")
        if self.not_compared:
            lines.append(f"results not compared with the model's: {self.not_compared}")
        return lines


def _listed(differences: Sequence[Difference]) -> list[str]:
    lines = [f"result {one.value} is off by {one.error:.1e}" for one in differences[:SHOWN]]
    return [*lines, f"and {len(differences) - SHOWN} more results"] if len(differences) > SHOWN else lines


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
    output, gradient and buffer with those of the model itself, which is given the random numbers that the ranks drew.
    The results are compared once more after the program is split into forward and backward and its communication is
    overlapped, without Inductor.
    With mixed precision results cannot be equal and are left out. What rounding alone moves as far is equal, and counted
    (`rounded`). What was not compared is counted with the reason (`left_out`, `not_compared`).
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
    return comparison(keeper.graph, planned, call, options)


def comparison(explicit: GraphModule, planned: Planned, call: Call, options: Options) -> Check:
    """Check as `check` does, for a program that was planned; `explicit` is it with global shapes and collectives."""
    call = call.returning(planned.captured)
    precision = precision_of(explicit)
    ranks, training, tolerance = Ranks.of(call, planned), torch.is_grad_enabled(), TOLERANCE[precision]
    watch = _Comparison(explicit, ranks, tolerance)
    with filled():
        got = ranks.run(watch=watch.compare, same_copies=False)
        rounding = Rounding(call, precision, training, explicit, ranks, watch.drawn)
        values, found = watch.differences(rounding), tuple[Difference, ...]()
        run = run_overlapped(ranks, options)
        overlapped = tuple(differences(run.step, got.step, tolerance, rounding, run.apart))
        why = "" if options.mixed_precision is None else "it computes in another precision"
        if not why:
            try:
                expected = run_on_one_device(call, training=training, inside=watch.drawn.replayed())
                own, moved = with_buffers(got.step, call), watch.moved_by_decisions()
                found = tuple(differences(own, expected, tolerance, rounding, got.apart, moved))
            except ReplayError as error:
                why = f"random numbers cannot be made the same, {error}"
    return Check(
        planned.plan.mesh,
        watch.compared,
        next((one for one in values if not one.is_rounding), None),
        tuple(one for one in found if not one.is_rounding),
        tolerance,
        why,
        sum(one.is_rounding for one in (*values, *found)),
        dict(watch.left_out),
        0 if why else sum(map(len, (got.step.outputs, got.step.gradients, got.step.buffers))),
        tuple(one for one in overlapped if not one.is_rounding),
    )


def drawn_by(ranks: Ranks, explicit: GraphModule) -> Draws:
    """Return the random numbers that ranks draw in the program `explicit`."""
    watch = _Comparison(explicit, ranks, tolerance=0.0)
    if any(map(is_random, explicit.graph.nodes)):
        ranks.run(watch=watch.draw, same_copies=False)
    return watch.drawn


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


def precision_of(gm: GraphModule) -> torch.dtype:
    """Return the dtype that a program computes in, of several the one with the largest tolerance."""
    dtypes = [tensor.dtype for node in gm.graph.nodes if _computes(node) for tensor in results_of(node)]
    found = [dtype for dtype in dict.fromkeys(dtypes) if dtype in TOLERANCE]
    return max(found, key=TOLERANCE.__getitem__, default=torch.float64)


def _computes(node: Node) -> bool:
    """Return whether a call gives numbers that are rounded: it has some to compute with."""
    if node.op != "call_function":
        return False
    return any(tensor.is_floating_point() for value in operands(node) for tensor in results_of(value))


@dataclass
class Keeper(Observer):
    """Keep a copy of the program while its shapes are global and its collectives are in it."""

    kept: GraphModule | None = None

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        """Do nothing: there is nothing to keep yet."""

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        if pass_.gives is Stage.COLLECTIVE:
            self.kept = copy_graph(gm)

    @property
    def graph(self) -> GraphModule:
        assert self.kept is not None, "every pipeline gives a COLLECTIVE graph"
        return self.kept


class _Comparison:
    """Runs the program on whole tensors, and compares what ranks give with it.

    What the ranks draw at random is taken from them; copies of a draw are compared with it. So is what a comparison of
    numbers decides on ranks, where the numbers are so close that rounding decides.
    """

    def __init__(self, gm: GraphModule, ranks: Ranks, tolerance: float) -> None:
        self.gm, self.mesh, self.tolerance = gm, ranks.mesh, tolerance
        self.nodes = {node.name: node for node in gm.graph.nodes}
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.whole = Whole(ranks)
        self.wrong: dict[Node, tuple[float, float]] = {}  # distance, and in parts of the value
        self.decided: set[Node] = set()  # comparisons that rounding decides
        self.compared = 0
        self.left_out = Counter[str]()
        self.drawn = Draws()

    def compare(self, local: Node, parts: Sequence[Any]) -> None:
        for name in stands_for(local):
            node = self.nodes[name]
            if is_random(node) and self._draw(node, parts):
                self.left_out["drawn at random"] += 1
            elif is_unwritten(node):
                self.left_out["never written to"] += 1
            elif is_tensor(node) and _is_state(node):
                self.left_out["internal to a kernel"] += 1
            elif is_tensor(node):
                self._compare(node, parts)

    def draw(self, local: Node, parts: Sequence[Any]) -> None:
        """Take what is drawn, and compare nothing."""
        for node in (self.nodes[name] for name in stands_for(local)):
            if is_random(node):
                self._draw(node, parts)

    def _draw(self, node: Node, parts: Sequence[Any]) -> bool:
        """Take a value from the ranks; false for a copy of a draw, which has its value already."""
        number = draw_of(node)
        assert number is not None, f"%{node.name} has no number"
        is_new = number not in self.drawn.values
        if is_new:
            self.drawn.add(number, node, self._assembled(node, parts))
        self.whole.values[node] = self.drawn.values[number]
        return is_new or not is_tensor(node)

    def _compare(self, node: Node, parts: Sequence[Tensor]) -> None:
        self.compared += 1
        got, want = self._assembled(node, parts), self.whole.value(node)
        apart = copies_apart(parts, layout_of(node), self.mesh)
        if not is_equal(got, want, self.tolerance) or apart > self.tolerance:
            error = max(relative_error(got, want), apart)
            self.wrong[node] = max(distance(got, want), apart * norm_of(want)), error
            if not apart and self._is_close(node, got, want):
                self.whole.values[node] = got
                self.decided.add(node)

    def _is_close(self, node: Node, got: Tensor, want: Tensor) -> bool:
        """Return whether a node compares numbers that rounding moves, and these are close to each other where the ranks
        decide otherwise.
        """
        if node.target not in _COMPARISONS:
            return False
        values = [torch.as_tensor(self.whole.value(value) if isinstance(value, Node) else value) for value in node.args[:2]]
        if not any(map(torch.is_floating_point, values)):
            return False
        apart = (values[0].double() - values[1].double()).abs().expand_as(want)
        scale = apart[apart.isfinite()].square().mean().sqrt()
        return bool((apart[got != want] <= self.tolerance * scale).all())

    def moved_by_decisions(self) -> dict[Output, float]:
        """Return how far the comparisons that rounding decides move each result."""
        if not self.decided:
            return {}
        plain, graph = Whole(self.whole.ranks), self.gm.graph
        plain.values.update(self.drawn.in_graph(self.gm))
        ends = zip(outputs_of(graph), returned(graph), strict=True)
        return {
            output: distance(self.whole.value(node), plain.value(node)) for output, node in ends if isinstance(node, Node)
        }

    def differences(self, rounding: Rounding) -> tuple[Difference, ...]:
        """Return the wrong values in program order: the operands of the first are right."""
        return tuple(self._difference(node, rounding) for node in sorted(self.wrong, key=self.order.__getitem__))

    def _assembled(self, node: Node, parts: Sequence[Any]) -> Any:
        if not is_tensor(node):
            shapes = [tuple(tensor.shape) for tensor in results_of(node)]
            each = [_tensors(part) for part in parts]
            whole = [
                assemble([part[i] for part in each], shape, layouts_of(node)[i], self.mesh)
                for i, shape in enumerate(shapes)
            ]
            return tuple(whole)
        return assemble(list(parts), tuple(tensor_of(node).shape), layout_of(node), self.mesh)

    def _difference(self, node: Node, rounding: Rounding) -> Difference:
        far, error = self.wrong[node]
        rows = [
            f"on {name}: {_row(node, axis)}" for axis, name in enumerate(self.mesh.names) if self.mesh.sizes[axis] > 1
        ]
        item = item_of(node)
        op = format_target(item[0].target if item is not None else node.target)
        what = f"the {'collective' if is_step(node) else 'rule of'} {op}"
        row = f"{what} {'; '.join(rows)}"
        is_rounding = node in self.decided or far <= rounding.of_value(node, self.whole.value(node))
        return Difference(node.name, error, op, row, origin_of(node), is_rounding)


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, tuple | list) else [value]


def _is_state(node: Node) -> bool:
    """Return whether a value is what a kernel keeps for its backward, such as the state of a generator."""
    if (item := item_of(node)) is None or not isinstance(item[0].target, OpOverload):
        return False
    returns = item[0].target._schema.returns
    return item[1] < len(returns) and returns[item[1]].name in RESULTS_OF_DRAWS


def is_equal(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Compare numbers; whole ones have to be the same."""
    is_whole = not (want.is_floating_point() or want.is_complex())
    return torch.equal(got, want) if is_whole else relative_error(got, want) <= tolerance


def _row(node: Node, axis: int) -> str:
    """Format as `S(0), R -> S(0)` the placements on one axis of what a call is given and of what it gives."""
    if (item := item_of(node)) is not None:
        node = item[0]
    given: list[Layout] = (
        [layout_given(node, value) for value in operands(node)] if is_step(node) else list(needs_of(node))
    )
    return (
        f"{', '.join(str(one.on(axis)) for one in given)} -> {', '.join(str(one.on(axis)) for one in layouts_of(node))}"
    )


def with_buffers(got: Step, call: Call) -> Step:
    """Return a step with the buffers that it left as they were: the model may have changed them."""
    return replace(got, buffers={**dict(call.model.named_buffers()), **got.buffers})


def differences(
    got: Step,
    want: Step,
    tolerance: float,
    rounding: Rounding,
    apart: Mapping[Output, float] | None = None,
    moved: Mapping[Output, float] | None = None,
) -> Iterator[Difference]:
    """Return the results of a step that are not those of another.

    `apart` are errors of copies that ranks hold, `moved` are distances that results may have in addition to rounding.
    """
    kinds = (
        (OutputRole.OUTPUT, "outputs", got.outputs, want.outputs),
        (OutputRole.GRADIENT, "gradients", got.gradients, want.gradients),
        (OutputRole.BUFFER, "buffers", got.buffers, want.buffers),
    )
    for role, kind, mine, theirs in kinds:
        what = kind.removesuffix("s")
        yield from (Difference(f"{what} {name}", float("inf")) for name in sorted(mine.keys() ^ theirs.keys()))
        for name in (name for name in mine if name in theirs):
            one, other = mine[name], theirs[name]
            copies = (apart or {}).get(Output(role, name), 0.0)
            if not is_equal(one, other, tolerance) or copies > tolerance:
                far = max(distance(one, other), copies * norm_of(other))
                is_rounding = far <= rounding.of_result(kind, name, other) + (moved or {}).get(Output(role, name), 0.0)
                yield Difference(f"{what} {name}", max(relative_error(one, other), copies), is_rounding=is_rounding)
