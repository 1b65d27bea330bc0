"""Random numbers of a check: the model on one device is given those that the ranks drew.

A sharded program draws by a hash of the global index, a device by its generator. So the ranks run first, and where the
model draws, it gets the number of the same draw, in the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from passes._torch import OpOverload, intercepted, select_decompositions
from passes.ir.graph import draw_of, draws, is_random

aten = torch.ops.aten

RESULTS_OF_DRAWS = frozenset({"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"})


class ReplayError(Exception):
    """The model does not draw as the captured program does."""


@dataclass
class Draws:
    """The random numbers that the ranks drew, assembled, by the number of the draw; copies of a call draw the same."""

    ops: dict[int, OpOverload] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)

    def add(self, number: int, node: Node, value: Any) -> None:
        """Keep what was drawn by `node`."""
        assert isinstance(node.target, OpOverload)
        self.ops[number], self.values[number] = node.target, value

    def in_graph(self, gm: GraphModule) -> dict[Node, Any]:
        """Return the values of the random calls in `gm`, which is the program after any pass."""
        drawing = [node for node in gm.graph.nodes if is_random(node)]
        numbers = {node: draw_of(node) for node in drawing}
        if all(number is None for number in numbers.values()):  # not normalized yet, which numbers them in this order
            numbers = {node: number for number, node in enumerate(drawing)}
        return {node: self.values[number] for node, number in numbers.items() if number in self.values}

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Let PyTorch draw these numbers inside, in their order.

        Raises ReplayError where it draws others, or another number of times. Where the ranks drew none, it draws its own,
        the same each time.
        """
        if not self.values:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                yield
            return
        replay = _Replay([(self.ops[number], self.values[number]) for number in sorted(self.values)])
        with intercepted(replay, as_traced=True), torch.random.fork_rng(devices=[]):
            yield
        if len(replay.seen) < len(replay.drawn):
            raise ReplayError(f"it draws {len(replay.seen)} times, the program {len(replay.drawn)} times")


class _Replay:
    """Answers random calls from `drawn`. A call that starts from a state of the generator that was seen before, as in the
    recomputation of `torch.utils.checkpoint`, is the same draw again."""

    def __init__(self, drawn: list[tuple[OpOverload, Any]]) -> None:
        self.drawn = drawn
        self.table = select_decompositions(whole=frozenset())
        self.seen: dict[bytes, int] = {}

    def __call__(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if (
            not draws(op, args, kwargs) or kwargs.get("generator") is not None
        ):  # no program draws from another generator
            return op(*args, **kwargs)
        functional = _functional(op)
        if functional is not op:
            args = _with_defaults(op, args, kwargs)
        result: Any = NotImplemented
        if functional in self.table:
            with intercepted(self):
                result = self.table[functional](*args, **kwargs)
        if result is NotImplemented:
            result = self._next(functional, args, kwargs)
        return args[0].copy_(result) if functional is not op else result

    def _next(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        state = torch.get_rng_state()
        wanted = op(*args, **kwargs)  # moves the generator on
        number = self.seen.setdefault(state.numpy().tobytes(), len(self.seen))
        if number >= len(self.drawn):
            raise ReplayError(f"it draws more than the {len(self.drawn)} times of the program, at {op}")
        known, value = self.drawn[number]
        if not isinstance(wanted, Tensor) or not isinstance(value, Tensor):
            raise ReplayError(f"{op} draws inside of its kernel")
        if known is not op or wanted.shape != value.shape or wanted.dtype != value.dtype:
            raise ReplayError(
                f"its draw {number + 1} is {_shown(op, wanted)}, that of the program is {_shown(known, value)}"
            )
        return value.to(wanted.device, copy=True)


def _shown(op: OpOverload, value: Tensor) -> str:
    return f"{op} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _with_defaults(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return `args` with the defaults of `op` that a call leaves out: its other form may have none."""
    left = [argument for argument in op._schema.arguments[len(args) :] if not argument.kwarg_only]
    return (*args, *(argument.default_value for argument in left if argument.name not in kwargs))


def _functional(op: OpOverload) -> OpOverload:
    """Return the op that gives a new tensor for one that fills its first argument."""
    name = op._schema.name.removeprefix("aten::")
    if not op._schema.is_mutable or not name.endswith("_"):
        return op
    wanted = [str(argument.type) for argument in op._schema.arguments]
    for packet in (getattr(aten, name + "functional", None), getattr(aten, name.removesuffix("_"), None)):
        for overload in packet.overloads() if packet is not None else ():
            found: OpOverload = getattr(packet, overload)
            if [str(argument.type) for argument in found._schema.arguments] == wanted:
                return found
    raise ReplayError(f"{op} has no form that gives a new tensor")
