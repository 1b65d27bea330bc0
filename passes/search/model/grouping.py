"""Group calls that share one variable, because no reshard between them pays.

A reshard pays before or after a kernel. Inside a fused kernel it would cut the kernel in two; before or after a view it
moves the same bytes. So a view is grouped with its operand, and the calls of one fused kernel with each other. Two
places inside of a kernel remain: after a reduction whose partial sums have to be reduced first, and before a cast to
more bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from torch.fx import Graph, Node

from passes.cost.fused_regions import is_alias, is_fusible, regions
from passes.ir.graph import is_reshard, item_of, operands, results_of
from passes.ir.layout import Partial
from passes.search.model.strategies import Strategies, Strategy

FEW = 500  # strategies of a group, which are never too many; usual kernels have 50 on two axes
MORE = 2  # times the strategies of one of its calls: a group of more is too many; usual kernels have no more than one call
SMALL = 32  # calls, tied ones counted once: in a graph of no more, every call is a variable, as programs are small anyway


class Grouping:
    """Groups of the calls of a graph, found by joining a call to those whose values it reads."""

    def __init__(self, graph: Graph, strategies: Strategies, weights: Collection[Node], place: Callable[[Node], object]) -> None:
        """Prepare. `place` is the same for calls of one part of the step; values of `weights` stay variables of their own."""
        self._strategies, self._weights, self._place = strategies, weights, place
        self._region = {node: number for number, region in enumerate(regions(graph)) for node in region}
        self._members: dict[Node, list[Node]] = {}

    def of(self, calls: Iterable[Node]) -> list[tuple[Node, ...]]:
        """Return the groups in the order of their first calls."""
        for node in calls:
            self._members[node] = [node]
            for value in operands(node):
                maker = _maker(value)
                if maker in self._members and maker not in self._members[node] and self._go_together(maker, node):
                    self._join(maker, node)
        return list({id(members): tuple(members) for members in self._members.values()}.values())

    def _join(self, maker: Node, node: Node) -> None:
        members = self._members[maker]
        members += self._members[node]
        for member in self._members[node]:
            self._members[member] = members

    def _go_together(self, maker: Node, node: Node) -> bool:
        """Return whether two groups can be one, with all values between them inside."""
        one, other = set(self._members[maker]), set(self._members[node])
        between = [(v, user) for user in other for v in operands(user) if _maker(v) in one]
        between += [(v, user) for user in one for v in operands(user) if _maker(v) in other]
        return all(self._joins(value, user) for value, user in between)

    def _joins(self, value: Node, node: Node) -> bool:
        maker = _maker(value)
        if is_reshard(maker) or is_reshard(node) or self._place(maker) != self._place(node):
            return False
        if maker in self._weights or not self._is_near(maker, node) or _grows(value, node):
            return False
        if len(value.users) > 1 and (self._has_heavy(maker) or sum(map(_is_large, operands(maker))) != 1):
            return False  # after the call, each user would move separately what is now moved once
        made, needed = self._strategies.made(value), self._strategies.needed(node, value)
        partial = {(axis, placement) for axis, placement in made if isinstance(placement, Partial)}
        return (partial if is_fusible(maker.target) or is_alias(maker) else made) <= needed

    def _has_heavy(self, node: Node) -> bool:
        """Return whether a group has a call that computes more in the layout of its operands than in that of its
        result."""
        return any(map(_is_heavy, self._members[node]))

    def _is_near(self, maker: Node, node: Node) -> bool:
        """Return whether no place between two calls is worth a reshard."""
        if is_alias(node):
            return True
        if not is_fusible(node.target):
            return False
        kernels = [member for member in self._members[maker] if not is_alias(member)]
        return all(self._region[member] == self._region[node] for member in kernels)


def _maker(value: Node) -> Node:
    return (item_of(value) or (value,))[0]


def _is_heavy(node: Node) -> bool:
    """Return whether a call is a product, an attention or a convolution, not a pointwise kernel or a view."""
    return not is_fusible(node.target) and not is_alias(node)


def _is_large(value: Node) -> bool:
    return any(result.numel() > 1 for result in results_of(value))


def _grows(value: Node, node: Node) -> bool:
    """Return whether a cast or a view has more bytes than its operand."""
    return len(operands(node)) == 1 and _bytes(node) > _bytes(value)


def _bytes(node: Node) -> int:
    return sum(result.numel() * result.element_size() for result in results_of(node))


def joint_strategies(
    group: Sequence[Node], strategies: Mapping[Node, Sequence[Strategy]]
) -> Iterator[tuple[tuple[Node, ...], list[tuple[int, ...]]]]:
    """Yield the group with the strategies (numbers, one per call) that it can take together: each value inside has one layout.

    A group with far more strategies than any of its calls comes in parts, as one with many operands from outside can have
    billions.
    """
    most = max(FEW, MORE * max(len(strategies[node]) for node in group))
    waiting = list(group)
    while waiting:
        part, found = [waiting[0]], [{waiting[0]: one} for one in range(len(strategies[waiting[0]]))]
        refused = set[Node]()
        while (node := _adjacent(part, waiting, refused)) is not None:
            wider = list(islice(_joined(found, node, part, strategies), most + 1))
            if len(wider) > most:
                refused.add(node)
            else:
                part.append(node)
                found = wider
        calls = tuple(node for node in group if node in part)
        yield calls, [tuple(picked[node] for node in calls) for picked in found]
        waiting = [node for node in waiting if node not in part]


def _joined(
    found: Sequence[Mapping[Node, int]], node: Node, part: Sequence[Node], strategies: Mapping[Node, Sequence[Strategy]]
) -> Iterator[dict[Node, int]]:
    """Yield the strategies of a part and of one more call."""
    links = list(_links(node, part))
    fitting: dict[object, list[int]] = {}
    for one, strategy in enumerate(strategies[node]):
        key = tuple(strategy.needs[i] if is_user else strategy.results[i] for is_user, i, _, _ in links)
        fitting.setdefault(key, []).append(one)
    for picked in found:
        others = [(strategies[other][picked[other]], is_user, j) for is_user, _, other, j in links]
        key = tuple(strategy.results[j] if is_user else strategy.needs[j] for strategy, is_user, j in others)
        for one in fitting.get(key, ()):
            yield {**picked, node: one}


def _adjacent(part: Sequence[Node], waiting: Sequence[Node], refused: Collection[Node]) -> Node | None:
    """Return the first call that has a value in common with the part, and is neither in it nor refused."""
    free = (node for node in waiting if node not in part and node not in refused)
    return next((node for node in free if next(iter(_links(node, part)), None)), None)


def _links(node: Node, others: Sequence[Node]) -> Iterable[tuple[bool, int, Node, int]]:
    """Yield the values between a node and others: whether the node uses it, its position there, the other, the position there."""
    for i, value in enumerate(operands(node)):
        maker, position = item_of(value) or (value, 0)
        if maker in others:
            yield True, i, maker, position
    for other in others:
        for i, value in enumerate(operands(other)):
            maker, position = item_of(value) or (value, 0)
            if maker is node:
                yield False, position, other, i
