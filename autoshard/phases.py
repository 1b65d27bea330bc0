"""The compiler, in order: five phases, the passes of each, and one reason per pass. Passes are composed here alone.

    prepare          the captured graph in few forms
    place            a layout for every value
    lower            layouts that disagree become collectives, shapes those of one device
    rematerialize    what the backward computes again instead of keeping it
    overlap          once partitioned, of the forward and of the backward: communication beside computation

A new pass is a file in `passes/` and a line here, in the phase that it belongs to. For one run it is a line of the user's:
`Options(passes=inserted(default_passes(), Mine(), before="lower_reshards"))`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from passes.base import Pass
from passes.bucket_collectives import BUCKET_BYTES, BucketCollectives
from passes.cancel_reshards import CancelReshards
from passes.cast_parameters import CastParameters
from passes.decompose import Decompose
from passes.decompose_matmuls import DecomposeMatmuls
from passes.errors import UserError
from passes.fold import Fold
from passes.fuse_collectives import FuseCollectives
from passes.insert_reshards import InsertReshards
from passes.localize import Localize
from passes.lower_reshards import LowerReshards
from passes.normalize import Normalize
from passes.propagate import Propagate
from passes.rematerialize import Rematerialize
from passes.schedule_overlap import ScheduleOverlap
from passes.seed import Seed

Passes = tuple[Pass, ...]


@dataclass(frozen=True)
class Phases:
    """The passes from a captured graph to a per-device program, set for one plan.

    `seed` holds recipes and constraints, `cast` the dtypes of mixed precision; `choose` is a `Propagate` or a `Solve`; `kept`
    is what blocks keep of their values (None: nothing is computed again).
    """

    seed: Seed = field(default_factory=Seed)
    cast: CastParameters = field(default_factory=CastParameters)
    choose: Pass = field(default_factory=Propagate)
    kept: tuple[str, ...] | None = None

    @property
    def passes(self) -> Passes:
        """All phases up to the partitioner, in order."""
        return (*self.prepare, *self.place, *self.lower, *self.rematerialize)

    @property
    def prepare(self) -> Passes:
        """One form for the same program; plans of one model share what it gives."""
        return (Normalize(),)

    def prepare_folded(self, fold: Fold) -> Passes:
        """As `prepare`, with equal layers written once: the graph that candidate plans are evaluated on."""
        return (*self.prepare, fold)

    @property
    def place(self) -> Passes:
        """A layout for every value."""
        return (*self.constrain, self.choose)

    @property
    def constrain(self) -> Passes:
        """The part of `place` that a search has to respect."""
        return (
            self.seed,  # what the user and the recipes ask for, as pins
            self.cast,  # stored, computed and reduced dtypes: after the pins, so that casts precede gathers
        )

    @property
    def lower(self) -> Passes:
        """The program of one device."""
        return (*self.make_explicit, *self.make_collectives, *self.make_local)

    @property
    def make_explicit(self) -> Passes:
        """The part of `lower` that says what moves: enough to price a recipe by the solver's model."""
        return (
            InsertReshards(),  # disagreements become nodes
            FuseCollectives(),  # terms of a sum are added before they are reduced, what is cast moves in its narrower dtype
        )

    @property
    def make_collectives(self) -> Passes:
        """The part of `lower` that says how it moves, while shapes are global."""
        return (
            CancelReshards(),  # as few reshards as will do: after fusing, which wants them next to their sums
            LowerReshards(),  # each as collectives
        )

    @property
    def make_local(self) -> Passes:
        """The part of `lower` that leaves the global view."""
        return (
            Localize(),  # shapes of one device
            Decompose(),  # what the backend wants in pieces
        )

    @property
    def rematerialize(self) -> Passes:
        """What the backward computes again: after all that makes or takes apart calls."""
        return (Rematerialize(self.kept),)

    def fill(self, passes: Passes) -> Passes:
        """Return the user's `passes` with this plan's settings, where a pass was left as it is by default."""
        unset, own = (one.constrain + one.rematerialize for one in (Phases(), self))
        return tuple(next((mine for usual, mine in zip(unset, own, strict=True) if usual == one), one) for one in passes)


@dataclass(frozen=True)
class OverlapPasses:
    """The passes on the forward, or on the backward, once they are partitioned.

    `memory_limit` is in bytes that the graph may take (None: about what it takes as it is), `bucket_bytes` in those that one
    collective of parameters or gradients may bring; `fused` says that the backend fuses pointwise calls.
    """

    memory_limit: int | None
    bucket_bytes: int = BUCKET_BYTES
    split_matmuls: bool = True
    fused: bool = True
    symmetric_memory: bool = False

    @property
    def passes(self) -> Passes:
        """The whole phase, in order."""
        return (*self.chunk, *self.schedule)

    @property
    def chunk(self) -> Passes:
        """Messages of tensor parallelism beside the products that read or make them, where it pays."""
        return (DecomposeMatmuls(self.memory_limit, self.fused, self.symmetric_memory),) if self.split_matmuls else ()

    @property
    def schedule(self) -> Passes:
        """The order of what is left."""
        return (
            BucketCollectives(self.bucket_bytes, self.memory_limit, self.fused),  # one message for many parameters
            ScheduleOverlap(self.memory_limit, self.fused),  # after all that makes kernels and collectives
        )


def default_passes() -> Passes:
    """Return the passes that run where `Options(passes=...)` says nothing, not yet set for a plan."""
    return Phases().passes


def inserted(passes: Passes, new: Pass, *, before: str) -> Passes:
    """Return `passes` with a `new` one before the one of that name. Raises UserError where there is none."""
    at = _index(passes, before)
    return (*passes[:at], new, *passes[at:])


def replaced(passes: Passes, name: str, *new: Pass) -> Passes:
    """Return `passes` with others, or none, in the place of the one of that name. Raises UserError where there is none."""
    at = _index(passes, name)
    return (*passes[:at], *new, *passes[at + 1 :])


def _index(passes: Passes, name: str) -> int:
    names = [one.name for one in passes]
    if name not in names:
        raise UserError(f"there is no pass {name!r}; passes are {', '.join(names)}")
    return names.index(name)
