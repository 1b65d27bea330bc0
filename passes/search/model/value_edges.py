"""The values of a factor graph, which are the edges between its variables, and the segments of the step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch.fx import Node

from passes.cost.fused_regions import bytes_read, is_alias, is_fusible, is_reduction, source_of
from passes.ir.graph import is_reshard, is_tensor, item_of, note_of, operands, tensor_of
from passes.ir.matmul_chunks.sites import SUMS
from passes.search.model.factor_graph import Port, Segment, Value
from passes.search.model.skeleton import Owner
from passes.search.model.step_structure import StepStructure, is_read_by_kernels

aten = torch.ops.aten
PRODUCTS: Mapping[object, int] = {aten.mm.default: 0, aten.addmm.default: 1}  # the operand whose rows are cut into chunks

Ends = Mapping[Node, list[Port]]  # operands that return a value


def values_of(
    structure: StepStructure,
    owners: Mapping[Node, Owner],
    ends: Mapping[int, Port],
    inside: Collection[tuple[Node, int]],
    *,
    is_placed: bool = False,
) -> Iterator[Value]:
    """Yield a value for each result that variables use, tied ones as one; forward and backward use of a parameter are
    separate.

    `owners` are of leaders, `ends` of positions in the output; values `inside` a variable are left out. If all layouts are
    known (`is_placed`), a value and its permutation are one also where they are of two variables, and a gradient may be reduced
    before its cast, as a recipe may do.
    """
    returned: dict[Node, list[Port]] = {}
    for position, value, _ in structure.outputs:
        if position in ends:
            returned.setdefault(value, []).append(ends[position])
    permuted = {
        node
        for node in structure.nodes
        if _is_permutation(node, structure) and node not in returned
        if is_placed or len({owners[structure.ties.leader[one]].variable for one in (node, *operands(node))}) == 1
    }
    grouped: dict[tuple[Port, tuple[Port, ...], bool], list[Node]] = {}
    for node in structure.nodes:
        if not is_tensor(node) or node in permuted:
            continue
        source, position = item_of(node) or (node, 0)
        for is_forward, users in _users(node, structure, owners, returned, inside, permuted).items():
            owner = owners[structure.ties.leader[source]]
            maker = Port(owner.variable, owner.results + position)
            grouped.setdefault((maker, users, is_forward), []).append(node)
    gathered: dict[object, int] = {}
    read_again = {node: nbytes for region in structure.fused for node, nbytes in _read_again(region, structure)}
    for number, ((maker, users, is_forward), members) in enumerate(grouped.items()):
        node = members[0]
        hides = node in structure.weights or node in structure.gradients
        if hides and is_forward:
            gathered[maker, node] = number
        tensor = tensor_of(node)
        places = [_place(member, structure, is_forward=is_forward) for member in (members if hides else members[:1])]
        segment = structure.segment.get(structure.ties.leader[places[0]], 0)
        yield Value(
            node.name,
            node,
            maker,
            users,
            tuple(tensor.shape),
            tensor.element_size(),
            sum(structure.ties.count[member] for member in members),
            segment,
            hides=hides,
            first=structure.share_of_first(places, segment) if hides else 0.0,
            last=structure.share_of_last(places, segment) if hides else 0.0,
            is_parameter=node in structure.weights,
            gathered_in_forward=gathered.get((maker, node), -1) if not is_forward else -1,
            cast_from=_cast_from(node) if node in structure.weights and not is_forward else 0,
            is_saved=node not in structure.weights and node in structure.read,
            is_counted=structure.ties.leader[source_of(node)] in structure.saved,
            repeat_segment=_repeat_segment(node, structure),
            stays_partial=not is_placed and node in structure.gradients and _is_widened(node, tensor.element_size(), structure),
            is_of_kernel=not is_fusible(source_of(node).target),
            is_for_kernels=is_read_by_kernels(node),
            read_again=read_again.get(node, 0),
            products=_variables(_products_of(node), structure, owners),
            terms=_variables(_terms(node), structure, owners),
        )


def _users(
    node: Node,
    structure: StepStructure,
    owners: Mapping[Node, Owner],
    returned: Ends,
    inside: Collection[tuple[Node, int]],
    permuted: Set[Node],
) -> dict[bool, tuple[Port, ...]]:
    """Return the users of a value in the forward and in the backward; of one that is no parameter, together.

    Those that read it permuted are among them: what is gathered for both is sent once (`cancel_reshards`).
    """
    found: dict[bool, dict[Port, None]] = {}
    leader, is_weight = structure.ties.leader, node in structure.weights
    readers: list[tuple[Node, Node, tuple[int, ...] | None]] = [(node, user, None) for user in node.users]
    for one in permuted & node.users.keys():
        readers += [(one, user, _order(one)) for user in one.users]
    for value, user, order in readers:
        if user.op == "output" or item_of(user) is not None:
            continue
        owner = owners[leader[user]]
        for i, operand in enumerate(operands(user)):
            if operand is value and (leader[user], i) not in inside:
                for is_forward in _directions(user, structure) if is_weight else (True,):
                    found.setdefault(is_forward, {})[Port(owner.variable, owner.needs + i, order)] = None
    for port in returned.get(node, ()):
        found.setdefault(node in structure.forward or not is_weight, {})[port] = None
    ordered = sorted(found.items(), reverse=True)
    return {key: tuple(sorted(ports, key=lambda port: (port.variable, port.slot))) for key, ports in ordered}


def _directions(user: Node, structure: StepStructure) -> set[bool]:
    """Return whether a user of a parameter is of the forward (True) or the backward (False); one that makes another form of the
    parameter is of what the users of that are of."""
    users = [other for other in user.users if other.op != "output"]
    if user not in structure.weights or not users:
        return {user in structure.forward}
    return set[bool]().union(*(_directions(other, structure) for other in users))


def _cast_from(node: Node) -> int:
    """Return the bytes per element of the tensor that a kernel makes this value from, such as a cast; 0 if no kernel makes it."""
    return 0 if node.op == "placeholder" or is_alias(node) else tensor_of(operands(node)[0]).element_size()


def _is_permutation(node: Node, structure: StepStructure) -> bool:
    """Return whether a value is the result of a call with its dims in another order, and none is a parameter."""
    if node.target is not aten.permute.default or node in structure.weights:
        return False
    (source,) = operands(node)
    return source.op == "call_function" and source.target is not aten.permute.default and item_of(source) is None


def _order(permuted: Node) -> tuple[int, ...]:
    ndim, dims = tensor_of(permuted).dim(), permuted.args[1]
    assert isinstance(dims, list | tuple)
    return tuple(dim % ndim for dim in dims if isinstance(dim, int))


def _place(node: Node, structure: StepStructure, *, is_forward: bool) -> Node:
    """Return the call that a value's transition is next to: its maker, or its first user for a parameter."""
    while node in structure.weights:
        users = [user for user in node.users if user.op != "output" and is_forward in _directions(user, structure)]
        if not users:
            break
        node = users[0]
    return node


def _repeat_segment(node: Node, structure: StepStructure) -> int:
    """Return the segment of the first backward call that uses a value of the forward, -1 if there is none."""
    if node in structure.weights or node not in structure.forward:
        return -1
    users = (user for user in node.users if user.op != "output" and user not in structure.forward)
    return min((structure.segment[user] for user in users if user in structure.segment), default=-1)


def _products_of(value: Node) -> Iterator[Node]:
    """Yield the products that read the rows of a value, perhaps through views."""
    for user in value.users:
        if is_alias(user):
            yield from _products_of(user)
        elif user.target in PRODUCTS and user.args[PRODUCTS[user.target]] is value:
            yield user


def _terms(value: Node) -> list[Node]:
    """Return the products whose sum, perhaps cast, a value is; none if it depends on anything else (`sites_in` splits alike)."""
    node = source_of(value)
    if node.target in PRODUCTS:
        return [node]
    if node.target not in SUMS or any(tensor_of(one).shape != tensor_of(node).shape for one in operands(node)):
        return []
    parts = [_terms(one) if len(one.users) == 1 else [] for one in operands(node)]
    return [term for part in parts for term in part] if all(parts) else []


def _variables(nodes: Iterable[Node], structure: StepStructure, owners: Mapping[Node, Owner]) -> tuple[int, ...]:
    """Return the variables of calls, each once."""
    return tuple(dict.fromkeys(owners[structure.ties.leader[node]].variable for node in nodes))


def _read_again(region: Sequence[Node], structure: StepStructure) -> Iterator[tuple[Node, int]]:
    """Yield the reductions that a fused kernel uses itself, as a loss does its sums of exponentials, each with the bytes of what
    the kernel reads before it."""
    inside, read = {*region, *structure.inlined}, dict[Node, int]()
    for node in region:
        outside = (operand for operand in operands(node) if source_of(operand) not in inside)
        read |= {source_of(operand): bytes_read(node, operand) for operand in outside}
        if is_reduction(node.target) and any(source_of(operand) is node for user in region for operand in operands(user)):
            yield node, sum(read.values())


def _is_widened(gradient: Node, itemsize: int, structure: StepStructure) -> bool:
    """Return whether mixed precision casts a gradient, perhaps a view of it, to a dtype of more bytes, to be reduced in that."""
    users = [user for user in gradient.users if user.op == "call_function" and not is_reshard(user)]
    if any(note_of(user) and tensor_of(user).element_size() > itemsize for user in users):
        return True
    return any(user in structure.gradients and _is_widened(user, itemsize, structure) for user in users)


def segments_of(structure: StepStructure) -> tuple[Segment, ...]:
    """Describe the segments: a layer's gathers hide beside the layer before, its reductions beside the layer after it.

    So one layer's are exposed, of the list that the forward begins with and the backward ends with, and all before the first
    layer of the forward and after the last of the backward. What is between hides beside the layers. Messages between the kernels
    of a backward hide, but for one layer's, beside the products that make gradients of parameters, which nothing waits for.
    """
    trained = {structure.segment[node] for node in structure.gradients if node in structure.segment}
    found, edges = [], _edges(structure)
    for number, (name, is_forward) in enumerate(structure.names):
        layers, edge = _layers(structure, number), "start" if is_forward else "end"
        direction = "forward" if is_forward else "backward"
        is_exposed = number in edges or name == edge or not edges
        between = 1.0 / layers if _is_of_layers(name) and number in trained else 1.0
        found.append(Segment(f"{name} {direction}", layers, 1.0 / layers if is_exposed else 0.0, between, not is_forward))
    return tuple(found)


def _edges(structure: StepStructure) -> set[int]:
    """Return the segments of layers that the forward begins with, and that the backward ends with."""
    runs: dict[bool, list[int]] = {True: [], False: []}
    for node in structure.nodes:
        number = structure.segment.get(node)
        if number is not None and node not in structure.weights and node not in structure.gradients:
            name, is_forward = structure.names[number]
            runs[is_forward] += [number] if _is_of_layers(name) else []
    return {*runs[True][:1], *runs[False][-1:]}


def _is_of_layers(name: str) -> bool:
    return name not in ("start", "end")


def _layers(structure: StepStructure, number: int) -> int:
    """Return how many layers a segment stands for: those of each kind, together. Layers without weights, such as a ReLU,
    send nothing and do not count, unless no layer has weights."""
    ties, counts = structure.ties, dict[Node, int]()
    for node, segment in structure.segment.items():
        if segment == number:
            counts[ties.leader[node]] = counts.get(ties.leader[node], 0) + ties.count[node]
    kinds: dict[str, int] = {}
    for leader, count in counts.items():
        kinds[ties.layer[leader]] = max(kinds.get(ties.layer[leader], 0), count)
    with_weights = {ties.layer[ties.leader[node]] for node in structure.nodes if node.op == "placeholder"}
    return sum(count for layer, count in kinds.items() if layer in with_weights) or sum(kinds.values()) or 1
