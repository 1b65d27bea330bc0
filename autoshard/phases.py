"""The compiler's pipeline in order: five phases and the passes of each. Passes are composed only here.

    prepare          normalize the captured graph to few forms
    place            choose a layout for every value
    lower            turn layouts that disagree into collectives, and global shapes into local ones
    rematerialize    recompute values in the backward instead of keeping them
    overlap          after partitioning, of the forward and of the backward: hide communication behind computation

A new pass is a file in `passes/` and a line here, in its phase. To add a pass for one run:
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
from passes.pad import Pad
from passes.propagate import Propagate
from passes.rematerialize import Rematerialize
from passes.schedule_overlap import ScheduleOverlap
from passes.seed import Seed

Passes = tuple[Pass, ...]


@dataclass(frozen=True)
class Phases:
    """The passes from a captured graph to a per-device program, configured for one plan.

    `seed` holds recipes and constraints, `cast` the dtypes of mixed precision; `choose` is a `Propagate` or a `Solve`;
    `kept` is what blocks keep of their values (None: nothing is recomputed); `pad` says what dims are made to divide by.
    """

    seed: Seed = field(default_factory=Seed)
    cast: CastParameters = field(default_factory=CastParameters)
    choose: Pass = field(default_factory=Propagate)
    kept: tuple[str, ...] | None = None
    pad: Pad = field(default_factory=Pad)

    @property
    def passes(self) -> Passes:
        """Return the passes of all phases up to the partitioner, in order."""
        return (*self.prepare, *self.place, *self.lower, *self.rematerialize)

    @property
    def prepare(self) -> Passes:
        """Return the passes that normalize a captured graph; all plans of a model share the result."""
        return (
            Normalize(self.pad.parts),
            self.pad,  # dims that axes do not divide
        )

    def prepare_folded(self, fold: Fold) -> Passes:
        """Return the passes of `prepare` and the fold of equal layers; candidate plans are evaluated on the folded
        graph.
        """
        return (*self.prepare, fold)

    @property
    def place(self) -> Passes:
        """Return the passes that choose a layout for every value."""
        return (*self.constrain, self.choose)

    @property
    def constrain(self) -> Passes:
        """Return the passes of `place` that set the constraints of a search."""
        return (
            self.seed,  # constraints of the user and the recipes, as pins
            self.cast,  # stored, computed and reduced dtypes: after the pins, so that casts precede gathers
        )

    @property
    def lower(self) -> Passes:
        """Return the passes that make the program of one device."""
        return (*self.make_explicit, *self.make_collectives, *self.make_local)

    @property
    def make_explicit(self) -> Passes:
        """Return the passes of `lower` that insert reshards; their result is enough to price a recipe by the solver's
        model.
        """
        return (
            InsertReshards(),  # a node wherever a layout is not the one that a user of the value needs
            FuseCollectives(),  # add terms before they are reduced, and send casts in the narrower dtype
        )

    @property
    def make_collectives(self) -> Passes:
        """Return the passes of `lower` that turn reshards into collectives; shapes are still global."""
        return (
            CancelReshards(),  # drop unneeded reshards; after fusing, which needs them next to their sums
            LowerReshards(),  # each reshard becomes collectives
        )

    @property
    def make_local(self) -> Passes:
        """Return the passes of `lower` that replace global shapes by local ones."""
        return (
            Localize(),  # shapes of one device
            Decompose(),  # ops that the backend cannot compile whole
        )

    @property
    def rematerialize(self) -> Passes:
        """Return the passes that choose what the backward recomputes; they follow all passes that add or split calls.
        """
        return (Rematerialize(self.kept),)

    def fill(self, passes: Passes) -> Passes:
        """Return the user's `passes` with this plan's settings for passes that were left at their defaults."""
        unset, own = (one.prepare + one.constrain + one.rematerialize for one in (Phases(), self))
        return tuple(next((mine for usual, mine in zip(unset, own, strict=True) if usual == one), one) for one in passes)


@dataclass(frozen=True)
class OverlapPasses:
    """The passes on the forward, or on the backward, after partitioning.

    `memory_limit` is the peak in bytes that the graph may have (None: about what it has before), `bucket_bytes` the
    maximum that one collective of parameters or gradients brings to a rank; `fused` says that the backend fuses
    pointwise calls.
    """

    memory_limit: int | None
    bucket_bytes: int = BUCKET_BYTES
    split_matmuls: bool = True
    fused: bool = True
    symmetric_memory: bool = False

    @property
    def passes(self) -> Passes:
        """Return all passes of the phase, in order."""
        return (*self.chunk, *self.schedule)

    @property
    def chunk(self) -> Passes:
        """Return the passes that send the messages of tensor parallelism concurrently with the products that read or
        make them.
        """
        cut = DecomposeMatmuls(self.memory_limit, self.fused, self.symmetric_memory, self.bucket_bytes)
        return (cut,) if self.split_matmuls else ()

    @property
    def schedule(self) -> Passes:
        """Return the passes that bucket and order the remaining collectives."""
        return (
            BucketCollectives(self.bucket_bytes, self.memory_limit, self.fused),  # one message for many parameters
            ScheduleOverlap(self.memory_limit, self.fused),  # after all passes that add kernels and collectives
        )


def default_passes() -> Passes:
    """Return the passes that run if `Options(passes=...)` is not given, not yet configured for a plan."""
    return Phases().passes


def inserted(passes: Passes, new: Pass, *, before: str) -> Passes:
    """Return `passes` with `new` before the pass of that name. Raises UserError if there is none."""
    at = _index(passes, before)
    return (*passes[:at], new, *passes[at:])


def replaced(passes: Passes, name: str, *new: Pass) -> Passes:
    """Return `passes` with others, or none, in place of the pass of that name. Raises UserError if there is none."""
    at = _index(passes, name)
    return (*passes[:at], *new, *passes[at + 1 :])


def _index(passes: Passes, name: str) -> int:
    names = [one.name for one in passes]
    if name not in names:
        raise UserError(f"there is no pass {name!r}; passes are {', '.join(names)}")
    return names.index(name)
