"""Let ranks agree before a program first runs: whether one failed, and whether programs and values are the same.

Every question is one message per rank over a control group, so that no rank waits in a collective that another never
reaches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from autoshard.runtime.calls.arguments import SHOWN, joined
from autoshard.runtime.process_groups import MeshGroups
from passes._torch import OpOverload, during_timeout
from passes.errors import AutoshardError, DistributedError, InputError
from passes.ir.graph import operands, tensor_of, transfer_of
from passes.ir.layout import Layout, Shard
from passes.ir.mesh import Mesh
from passes.ir.text import format_target, format_type

T = TypeVar("T")

# Bytes above which a tensor is summed on its device, as copying it to the CPU to hash it would be slow; also the length of
# a block of the sum, in 8-byte words.
HASHED_BYTES_MAX = 1 << 20

# Seconds that ranks wait for one that plans or compiles: more than either takes. One that dies breaks the connection.
WORK = 24 * 3600.0

FEW = 16  # integers that ranks may give alike by chance, as labels of a few samples
FEW_ROWS = 4  # unlike rows of integers, of which fewer are often alike by chance, as masks of two padded samples


@dataclass(frozen=True)
class Outcome:
    """The result of one rank's attempt."""

    failure: str | None  # "InputError: message"
    is_user_error: bool


def exchange(groups: MeshGroups, value: T) -> list[T]:
    """Return the values of all ranks, in the order of `mesh.ranks`. Raises DistributedError if a rank has stopped."""
    if groups.mesh.size == 1:
        return [value]
    values: list[Any] = [None] * groups.mesh.size
    try:
        dist.all_gather_object(values, value, group=groups.control)
    except RuntimeError as error:
        raise groups.watch.stopped(error) from error
    return values


def of_first(groups: MeshGroups, value: T) -> T:
    """Return the value of the mesh's first rank. Raises DistributedError if a rank has stopped."""
    if groups.mesh.size == 1:
        return value
    values = [value]
    try:
        dist.broadcast_object_list(values, src=groups.mesh.ranks[0], group=groups.control)
    except RuntimeError as error:
        raise groups.watch.stopped(error) from error
    return values[0]


def check_same_call(groups: MeshGroups, said: tuple[str, ...]) -> None:
    """Raise DistributedError if ranks are about to make programs for different calls; `said` is what is known of this one."""
    calls = exchange(groups, said)
    other = next((number for number, one in enumerate(calls) if one != calls[0]), None)
    if other is not None:
        first, second = _shown(calls[0], calls[other]), _shown(calls[other], calls[0])
        advice = "; give many numbers as a tensor" if max(len(calls[0]), len(calls[other])) > SHOWN else ""
        raise DistributedError(
            f"ranks make different calls: rank {groups.mesh.ranks[0]} ({first}), rank {groups.mesh.ranks[other]} "
            f"({second}); every rank makes the same call: with parts of the same size, as model.shard(...) "
            f"gives, or without the last batch, and with the same dtypes, arguments and settings of the model{advice}"
        )


def _argument(described: str) -> str:
    """Return the argument that "state.0: float32[2, 4]" is of."""
    return described.partition(":")[0].partition(".")[0]


def _shown(said: tuple[str, ...], other: tuple[str, ...]) -> str:
    """Return what is said of a call, or if that is much, what is not said of the other; also of what only the other gives."""
    own, others = (dict.fromkeys(_argument(one) for one in call if ":" in one) for call in (said, other))
    said = (*said, *(f"{name}: as by default" for name in others if name not in own))
    if len(said) > SHOWN:
        known = set(other)
        said = tuple(one for one in said if one not in known)
    return joined(said) or "fewer arguments"


def together(groups: MeshGroups, stage: str, attempt: Callable[[], T]) -> T:
    """Return `attempt()` of this rank, after all ranks have made theirs.

    If it failed here, its own error is raised; if it failed only elsewhere, a DistributedError that names the rank and
    its message. `stage` says what was attempted, as in "compiling"; the others wait for it as long as it takes.
    """
    if groups.mesh.size == 1:
        return groups.watch.working(stage, attempt)
    with during_timeout([groups.control], WORK):
        return _together(groups, stage, attempt)


def _together(groups: MeshGroups, stage: str, attempt: Callable[[], T]) -> T:
    failure: Exception | None = None
    result: list[T] = []
    try:
        result.append(groups.watch.working(stage, attempt))
    except Exception as error:  # raised again below, once the others know
        failure = error
    mine = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = exchange(groups, Outcome(mine, isinstance(failure, AutoshardError)))
    if failure is not None:
        raise failure
    failed = [(rank, o.failure) for rank, o in zip(groups.mesh.ranks, outcomes, strict=True) if o.failure is not None]
    if failed:
        ranks = ", ".join(str(rank) for rank, _ in failed)
        raise DistributedError(f"{stage} failed on rank {ranks}: {failed[0][1]}")
    return result[0]


def check_same_program(groups: MeshGroups, graphs: Sequence[GraphModule]) -> None:
    """Raise DistributedError if ranks are about to run different programs, whose collectives would not match.

    The message names the first collective that differs or, if they all agree, the first call that differs.
    """
    digests = exchange(groups, hashlib.sha256("\n".join(map(_described, graphs)).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    rank, other = groups.mesh.ranks[0], next(i for i, digest in enumerate(digests) if digest != digests[0])
    for what in (_collectives(graphs), _calls(graphs)):
        of_ranks = exchange(groups, what)
        for mine, theirs in zip_longest(of_ranks[0], of_ranks[other], fillvalue="at its end"):
            if mine != theirs:
                places = f"rank {rank} is {mine}, where rank {groups.mesh.ranks[other]} is {theirs}"
                raise DistributedError(f"ranks have different programs: {places}; {_ONE_SETUP}")


def _collectives(graphs: Sequence[GraphModule]) -> list[str]:
    """Return the collectives in order: "at collective 3 of the backward, all_reduce over dp of f32[8, 6] (%reduce)"."""
    found = []
    for half, gm in zip(("forward", "backward"), graphs, strict=False):
        issued = [(node, transfer) for node in gm.graph.nodes if (transfer := transfer_of(node)) is not None]
        for number, (node, transfer) in enumerate(issued, start=1):
            what = f"{format_target(node.target)} over {', '.join(transfer.axes)} of {format_type(tensor_of(operands(node)[0]))}"
            found.append(f"at collective {number} of the {half}, {what.removeprefix('_c10d_functional.')} (%{node.name})")
    return found


def _calls(graphs: Sequence[GraphModule]) -> list[str]:
    halves = zip(("forward", "backward"), graphs, strict=False)
    return [f"at {line!r} of the {half}" for half, gm in halves for line in _text(gm).splitlines()]


_ONE_SETUP = "build the same model, with the same options and example inputs, on each"


def _text(gm: GraphModule) -> str:
    return "\n".join([*_values(gm), str(gm.graph)])


def _values(gm: GraphModule) -> list[str]:
    return [f"{node.name}: {node.meta.get('val')}" for node in gm.graph.find_nodes(op="placeholder")]


def _described(gm: GraphModule) -> str:
    """Return all that `_text` says, in a form that is made faster."""
    calls = [f"{node.name} {_named(node.target)} {node.args} {node.kwargs}" for node in gm.graph.nodes]
    return "\n".join([*_values(gm), *calls])


def _named(target: Any) -> str:
    """Return the name of a target, which is the same in all processes."""
    return str(target) if isinstance(target, OpOverload | str) else torch.typename(target)


def _check_equal(groups: MeshGroups, digests: Sequence[str], what: str, advice: str) -> None:
    different = [rank for rank, digest in zip(groups.mesh.ranks, digests, strict=True) if digest != digests[0]]
    if different:
        ranks = ", ".join(map(str, different))
        raise DistributedError(f"rank {groups.mesh.ranks[0]} and rank {ranks} have different {what}; {advice}")


@dataclass(frozen=True)
class Given:
    """A tensor passed to a program; its layout says on which ranks it must be equal."""

    what: str  # "input 'tokens'"
    advice: str
    layout: Layout
    value: torch.Tensor


@dataclass(frozen=True)
class Compared:
    """Tensors that all ranks gave, and the digest of each on each rank, in the order of `mesh.ranks`."""

    mesh: Mesh
    given: tuple[Given, ...]
    digests: tuple[tuple[str, ...], ...]  # by tensor, by rank

    def differences(self) -> dict[int, str]:
        """Return a message per number in `given` for tensors that are replicated but differ."""
        found: dict[int, str] = {}
        for number, (item, digests) in enumerate(zip(self.given, self.digests, strict=True)):
            for axis, name in enumerate(self.mesh.names):
                if not isinstance(item.layout.on(axis), Shard):
                    problem = _difference(self.mesh, name, item, digests)
                    if problem is not None:
                        found.setdefault(number, problem)
        return found

    def repeated_axes(self) -> tuple[str, ...]:
        """Return the axes along which all ranks gave the same part of every tensor that is split there.

        A tensor of equal elements, such as a mask of ones, tells nothing.
        """
        return tuple(name for axis, name in enumerate(self.mesh.names) if self.mesh.sizes[axis] > 1 and self._repeats(axis))

    def shared(self) -> tuple[tuple[str, Given], ...]:
        """Return tensors that are split along an axis, but equal on all of its ranks while others are not, each with the axis.

        Rows that are all alike, such as positions, and integers that are few, such as labels, or that are in few unlike rows,
        such as a padding mask of a small batch, tell nothing.
        """
        found = list[tuple[str, Given]]()
        for axis, name in enumerate(self.mesh.names):
            split = self._split(axis)
            equal = [number for number in split if self._is_equal(number, axis)]
            for item in (self.given[number] for number in equal if len(equal) < len(split)):
                placement = item.layout.on(axis)
                assert isinstance(placement, Shard)
                if _has_unlike_rows(item.value, placement.dim):
                    found.append((name, item))
        return tuple(found)

    def _repeats(self, axis: int) -> bool:
        split = self._split(axis)
        return all(self._is_equal(number, axis) for number in split) and any(
            _is_varied(self.given[number].value) for number in split
        )

    def _split(self, axis: int) -> list[int]:
        return [number for number, item in enumerate(self.given) if isinstance(item.layout.on(axis), Shard)]

    def _is_equal(self, number: int, axis: int) -> bool:
        groups = self.mesh.groups((self.mesh.names[axis],))
        return all(len({self.digests[number][place] for place in group}) == 1 for group in groups)


def compare(groups: MeshGroups, given: Sequence[Given]) -> Compared:
    """Exchange digests of tensors. Raises DistributedError if ranks do not give the same tensors, by name."""
    described = exchange(groups, [(item.what, digest(item.value)) for item in given] if groups.mesh.size > 1 else [])
    _check_equal(groups, [str([what for what, _ in of_rank]) for of_rank in described], "parameters or inputs", _ONE_SETUP)
    by_tensor = zip(*([value for _, value in of_rank] for of_rank in described), strict=True)
    return Compared(groups.mesh, tuple(given) if groups.mesh.size > 1 else (), tuple(by_tensor))


def check_equal_values(groups: MeshGroups, given: Sequence[Given]) -> Compared:
    """Raise InputError if ranks have different values of a tensor that is replicated between them."""
    compared = compare(groups, given)
    if problems := compared.differences():
        raise InputError(problems[min(problems)])
    return compared


def _difference(mesh: Mesh, axis: str, item: Given, digests: Sequence[str]) -> str | None:
    for group in mesh.groups((axis,)):
        other = next((place for place in group if digests[place] != digests[group[0]]), None)
        if other is not None:
            return (
                f"{item.what} is replicated on axis {axis!r}, but ranks {mesh.ranks[group[0]]} and {mesh.ranks[other]} "
                f"gave different values; {item.advice}"
            )
    return None


def _is_varied(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and not bool((tensor == tensor.reshape(-1)[0]).all())


def _has_unlike_rows(tensor: torch.Tensor, dim: int) -> bool:
    """Return whether indices of a dim have unlike values, of which enough that ranks do not have the same by chance."""
    if tensor.shape[dim] < 2:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool((tensor == tensor.narrow(dim, 0, 1)).all())
    return tensor.numel() >= FEW and len(torch.unique(tensor, dim=dim).movedim(dim, 0)) >= FEW_ROWS


def digest(tensor: torch.Tensor) -> str:
    """Return a fingerprint of shape, dtype and values."""
    local = tensor.detach()
    values = local.resolve_conj().resolve_neg().reshape(-1)
    if values.stride(0) != 1:  # of one element, too: its stride may be any, and `contiguous` keeps it
        values = values.clone(memory_format=torch.contiguous_format)
    flat = values.view(torch.uint8)
    if flat.numel() > HASHED_BYTES_MAX:
        folded = _fold(flat)
    else:
        folded = hashlib.blake2b(flat.cpu().numpy().tobytes(), digest_size=16).hexdigest()
    return f"{tuple(local.shape)} {local.dtype} {folded}"


def _fold(flat: torch.Tensor) -> str:
    """Hash on the tensor's device: sum 8-byte words with random weights, modulo 2**64, block by block."""
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    generator = torch.Generator("cpu").manual_seed(0)
    weights = torch.randint(-(1 << 62), 1 << 62, (HASHED_BYTES_MAX,), generator=generator, device="cpu").to(flat.device) * 2 + 1
    sums = [int((block * weights[: block.numel()]).sum()) for block in torch.split(words, HASHED_BYTES_MAX)]
    rest = bytes(flat[words.numel() * 8 :].tolist())
    return hashlib.blake2b(repr(sums).encode() + rest, digest_size=16).hexdigest()
