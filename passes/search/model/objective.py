"""The objective that evaluation, relaxation and mixed-integer program share: the seconds of a step.

    step = sum over segments of max over resources of load[segment, resource] + recomputation(bytes)
    bytes[moment] = sum of state[moment] + max of working + sum of held, when the forward ends + max over segments of gathered

The resources of a segment are its kernels beside the messages inside a node and beside those between nodes; these links; each
link from when the first gradients are joined, or until the last layer begins; and the critical path: kernels and messages
that wait for each other, one after another. Each strategy of a variable adds to these
loads (`Variable.loads`), to the bytes that stay (`state`) and to those of one call (`working`). Each transition of a value
adds what its `TransitionTerms` say.
`recomputation` is the time to free what is over the memory limit when the forward ends, by `MemoryBudget`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.cost.fused_regions import is_alias, node_nbytes
from passes.ir.layout import Layout, Partial, R, Shard
from passes.search.model.factor_graph import RESOURCES, Bools, FactorGraph, Floats, Value
from passes.search.model.local_sizes import Shape
from passes.search.model.memory_budget import MemoryBudget
from passes.search.model.unit_costs import CHUNKS, UnitCosts


@dataclass(frozen=True, eq=False)
class TransitionTerms:
    """The terms that the transitions of a value add to the objective, by source and target layout.

    Loads [resource, source, target] and seconds are of all that the value stands for, and so are bytes but those gathered.
    """

    loads: Floats  # on the value's segment
    repeats: Bools  # the backward can repeat the transition rather than keep its result
    repeat_loads: Floats  # on its `repeat_segment`, where the transition is repeated
    seconds: Floats  # on links and of local steps, hidden or not
    link_seconds: Floats  # on links, hidden or not
    held: Floats  # bytes that stay for the backward because of the transition, beyond what the maker counts
    gathered: Floats  # bytes of one layer's parameter in the target layout, while the layer uses it
    moved: Floats  # by target: bytes of the value in that layout
    same: Bools
    impossible: Bools  # no steps lead from source to target, or none that may be taken


def transition_terms(
    graph: FactorGraph, value: Value, sources: Sequence[Layout], targets: Sequence[Layout], unit_costs: UnitCosts
) -> TransitionTerms:
    """Return the terms of a value that is made in `sources` and needed in `targets`."""
    costs = unit_costs.transition_costs(value.shape, value.itemsize, sources, targets, graph.together(value))
    same = _same(sources, targets)
    segment = graph.segments[value.segment]
    links, nothing = costs.on_links.sum(0), _nothing(*same.shape)
    copied = _copied(value, sources, targets, unit_costs)
    local = costs.local + copied + _read_again(value, sources, links, unit_costs) + _cast_again(value, sources, same, unit_costs)
    if value.hides:
        beside, awaited = unit_costs.beside(costs.exposed, costs.slowed), nothing
    else:
        awaits, slowed = unit_costs.split(costs.on_links, segment.exposed_between)
        beside, awaited = unit_costs.beside(awaits.sum(0) - unit_costs.spared(awaits), slowed), links
    if unit_costs.hiding.in_chunks:
        in_chunks = _in_chunks(graph, value, sources, targets, copied, unit_costs)
        if value.hides:  # what would be exposed is sent in chunks
            hidden = unit_costs.beside(np.zeros_like(costs.exposed), costs.slowed)
            exposed = np.divide(costs.exposed, links, out=np.ones_like(links), where=links > costs.exposed)
            waits = np.multiply(exposed, in_chunks, out=np.zeros_like(links), where=exposed > 0.0)
            beside = np.minimum(beside, waits + hidden)
        else:
            beside, awaited = (np.minimum(seconds + copied, in_chunks) - copied for seconds in (beside, awaited))
    if not value.hides:
        on_path = (local + awaited) * value.count
    else:  # messages on the path leave no products of weights' gradients for this one, which slows the path's kernels down
        on_path = costs.slowed.sum(0) * value.count if segment.is_backward else nothing
    again, slowed_again = unit_costs.split(costs.on_links, graph.segments[value.repeat_segment].exposed)
    repeats = _repeats(value, sources, same)
    on_links = costs.on_links * value.count
    late = on_links + costs.awaited * value.count
    if value.hides and segment.is_backward:
        # One layer's messages on the other link come before the first gradient's; what it gathers itself is sent until then.
        late = late + bool(segment.exposed) * value.first * (on_links[::-1] - (on_links if value.is_parameter else 0.0))
    moved = np.array([unit_costs.sizes.nbytes(value.shape, value.itemsize, target) for target in targets]) * value.count
    return TransitionTerms(
        np.stack([*(local + beside) * value.count, *on_links, *late, on_path]),
        repeats,
        # Nothing waits for a repeated transition: its local steps are not on the path.
        np.stack([*unit_costs.beside(again.sum(0), slowed_again) * value.count, *on_links, *on_links, nothing])
        if repeats.any()
        else _nothing(len(RESOURCES), *same.shape),
        (links + local) * value.count,
        links * value.count,
        _held(value, sources, moved, same, unit_costs),
        np.where(same, 0.0, moved[None, :]) / segment.layers if value.is_parameter else nothing,
        moved,
        same,
        costs.impossible | _reduces(sources, targets) if value.stays_partial else costs.impossible,
    )


def _repeats(value: Value, sources: Sequence[Layout], same: Bools) -> Bools:
    """Return which transitions the backward can repeat: those of sources that are kept, which partial sums are not."""
    is_kept = np.array([value.repeat_segment >= 0 and not source.has_partial for source in sources])
    found: Bools = ~same & is_kept[:, None]
    return found


def _reduces(sources: Sequence[Layout], targets: Sequence[Layout]) -> Bools:
    """Return which transitions reduce partial sums on an axis."""
    sides = ([[isinstance(one, Partial) for one in layout.placements] for layout in side] for side in (sources, targets))
    have, need = map(np.array, sides)
    found: Bools = (have[:, None] & ~need[None, :]).any(2)
    return found


def _copied(value: Value, sources: Sequence[Layout], targets: Sequence[Layout], unit_costs: UnitCosts) -> Floats:
    """Return the seconds of copies to and from the order in which ranks' parts are sent; a fused kernel makes them by the way."""
    if not (value.is_of_kernel or value.is_for_kernels):
        return _nothing(len(sources), len(targets))
    sizes, shape = unit_costs.sizes, value.shape
    sends, receives = np.zeros((2, len(sources), len(targets)), dtype=np.bool_)
    for axis in range(sizes.mesh.ndim):
        have, need = ([one.placements[axis] for one in side] for side in (sources, targets))
        moves, split = ~_same(have, need), np.array([one != R for one in have])
        inner, other = (np.array([sizes.is_inner(shape, one, axis) for one in side]) for side in (sources, targets))
        sends |= moves & split[:, None] & other
        receives |= moves & inner[:, None]
    sent, received = (np.array([sizes.nbytes(shape, value.itemsize, one) for one in side]) for side in (sources, targets))
    out = unit_costs.copied(value.is_of_kernel * sends * sent[:, None])
    return out + unit_costs.copied(value.is_for_kernels * receives * received)


def _read_again(value: Value, sources: Sequence[Layout], links: Floats, unit_costs: UnitCosts) -> Floats:
    """Return the seconds in which the rest of a kernel that a message splits reads its rows again, each rank its part of them."""
    sizes = unit_costs.mesh.sizes
    parts = [math.prod(size for one, size in zip(layout.placements, sizes, strict=True) if one != R) for layout in sources]
    seconds = value.read_again / np.array(parts) / unit_costs.hardware.memory_bandwidth
    return np.where(links > 0.0, seconds[:, None], 0.0)


def _cast_again(value: Value, sources: Sequence[Layout], same: Bools, unit_costs: UnitCosts) -> Floats:
    """Return the seconds in which the backward casts its part of a parameter before it gathers it."""
    if not value.cast_from:
        return _nothing(*same.shape)
    parts = np.array([unit_costs.sizes.nbytes(value.shape, value.itemsize + value.cast_from, source) for source in sources])
    seconds = parts / unit_costs.hardware.memory_bandwidth + unit_costs.hardware.launch
    return np.where(same, 0.0, seconds[:, None])


def _in_chunks(
    graph: FactorGraph,
    value: Value,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    copied: Floats,
    unit_costs: UnitCosts,
) -> Floats:
    """Return the seconds that gathers of rows for products, and reductions of products, add to those of kernels in chunks,
    copies included; without end for others. How the products are split is not known here: the fastest way counts."""
    partial = np.array([source.has_partial for source in sources])[:, None]
    have, need = (np.array([_shards(layout) for layout in side]) for side in (sources, targets))
    is_gather = ~partial & (have[:, None] > need[None, :])
    reading, making = (
        sum(float(graph.variables[number].seconds.min()) for number in numbers) / value.count
        for numbers in (value.products, value.terms)
    )
    if not reading and not making:
        return np.full(copied.shape, np.inf)
    sent = {n: n * unit_costs.link_seconds(value.shape, value.itemsize / n, sources, targets) for n in CHUNKS}
    found: Floats = np.full(copied.shape, np.inf)
    if reading:
        gathered = unit_costs.in_chunks(sent, reading, _concatenated(graph, value, sources, targets, unit_costs))
        found = np.where(is_gather, gathered, found)
    if making:
        runs = np.array([[_runs(unit_costs.sizes.local(value.shape, one), one, two) for two in targets] for one in sources])
        ordered = {n: np.where(runs == n, 0.0, copied) for n in CHUNKS}  # a chunk that is one run is in order
        found = np.where(partial, unit_costs.in_chunks(sent, making, ordered), found)
    return found


def _concatenated(
    graph: FactorGraph, value: Value, sources: Sequence[Layout], targets: Sequence[Layout], unit_costs: UnitCosts
) -> dict[int, Floats]:
    """Return the seconds in which chunks of a gathered value, by their number, are concatenated for the backward, and results of
    products, unless these write runs of whole rows where they belong."""
    sizes = unit_costs.sizes
    made = sum(node_nbytes(node) for n in value.products for node in graph.variables[n].nodes if not is_alias(node))
    results = unit_costs.copied(np.array(made / unit_costs.mesh.size))
    whole = np.array([sizes.nbytes(value.shape, value.itemsize, target) for target in targets]) * value.is_saved
    runs = np.array([[_runs(sizes.local(value.shape, two), one, two) for two in targets] for one in sources])
    return {n: np.where(runs % n == 0, 0.0, results) + unit_costs.copied(whole) for n in CHUNKS}


def _runs(shape: Shape, source: Layout, target: Layout) -> int:
    """Return the number of runs of rows that each rank has of a value that is gathered, or was not reduced yet, of this shape."""
    dims = [dim for dim in range(len(shape)) if source.axes_on(dim) != target.axes_on(dim)]
    return math.prod(shape[: dims[0]]) if dims else 1


def _shards(layout: Layout) -> int:
    return sum(isinstance(placement, Shard) for placement in layout.placements)


def _same(sources: Sequence[object], targets: Sequence[object]) -> Bools:
    numbers = {one: number for number, one in enumerate(dict.fromkeys((*sources, *targets)))}
    made, needed = (np.array([numbers[one] for one in side]) for side in (sources, targets))
    found: Bools = made[:, None] == needed[None, :]
    return found


def _held(value: Value, sources: Sequence[Layout], moved: Floats, same: Bools, unit_costs: UnitCosts) -> Floats:
    if not value.is_saved:
        return _nothing(*same.shape)
    counted = np.zeros(len(sources))
    if value.is_counted:
        sizes = [0.0 if one.has_partial else unit_costs.sizes.nbytes(value.shape, value.itemsize, one) for one in sources]
        counted = np.array(sizes) * value.count
    return np.where(same, 0.0, np.maximum(0.0, moved[None, :] - counted[:, None]))


def _nothing(*shape: int) -> Floats:
    """Return zeros that take no memory."""
    return np.broadcast_to(np.float64(0.0), shape)


def step_seconds(loads: Floats, nbytes: Floats, budget: MemoryBudget | None) -> float:
    """Return the objective of loads [segment, resource] and bytes [moment] per device."""
    recomputation = budget.seconds(nbytes) if budget is not None else 0.0
    return float(loads.max(1).sum()) + recomputation
