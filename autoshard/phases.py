"""The order of the compiler, one reason per pass."""

from __future__ import annotations

from passes.base import Pass
from passes.bucket_collectives import BucketCollectives
from passes.cancel_reshards import CancelReshards
from passes.cast_parameters import CastParameters
from passes.decompose import Decompose
from passes.decompose_matmuls import DecomposeMatmuls
from passes.fuse_collectives import FuseCollectives
from passes.insert_reshards import InsertReshards
from passes.localize import Localize
from passes.lower_reshards import LowerReshards
from passes.normalize import Normalize
from passes.propagate import Propagate
from passes.rematerialize import Rematerialize
from passes.schedule_overlap import ScheduleOverlap
from passes.seed import Seed


def default_pipeline(
    seed: Seed | None = None,
    cast: CastParameters | None = None,
    place: Pass | None = None,
    *,
    kept: tuple[str, ...] | None = None,
) -> tuple[Pass, ...]:
    """The passes from a captured graph to a per-device program.

    `seed` holds recipes and constraints, `cast` the dtypes of mixed precision, `place` chooses layouts (`Propagate()`
    or a `Solve`), `kept` is what blocks keep of their values (None: nothing is computed again); to change the pipeline,
    take this tuple apart and give it to `Options(passes=...)`.
    """
    return (
        Normalize(),  # fewer forms for the same program
        seed or Seed(),  # what the user and the recipes insist on, as pins
        cast or CastParameters(),  # stored, computed and reduced dtypes: behind the pins, so that casts precede gathers
        place or Propagate(),  # a layout for every value
        InsertReshards(),  # disagreements become nodes
        FuseCollectives(),  # terms of a sum are added before they are reduced, what is cast moves in its narrower dtype
        CancelReshards(),  # as few reshards as will do: behind the above, which wants them next to their sums
        LowerReshards(),  # each as collectives
        Localize(),  # shapes of one device
        Decompose(),  # what the backend wants in pieces
        Rematerialize(kept),  # what the backward computes again: behind all that makes or takes apart calls
    )


def overlap_pipeline(
    *,
    memory_limit: int | None,
    bucket_bytes: int,
    split_matmuls: bool,
    fused: bool,
    symmetric_memory: bool = False,
) -> tuple[Pass, ...]:
    """The passes on the forward, and on the backward, once they are partitioned; bytes that the graph may take, and that
    one collective of parameters or gradients may bring."""
    chunks = (DecomposeMatmuls(memory_limit, fused, symmetric_memory),) if split_matmuls else ()
    return (
        *chunks,  # messages of tensor parallelism beside the products that read or make them, where it pays
        BucketCollectives(bucket_bytes, memory_limit, fused),  # one message for many parameters, where it pays
        ScheduleOverlap(memory_limit, fused),  # behind all that makes kernels and collectives
    )
