"""What a user may choose; every field says what it trades."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Literal

import torch.distributed.tensor as dt
from torch.distributed.fsdp import MixedPrecisionPolicy

from passes.base import Pass
from passes.bucket_collectives import BUCKET_BYTES
from passes.errors import UserError

Placements = Mapping[str, Mapping[str, dt.Placement | str]]  # name or glob -> axis -> placement


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to distribute a model.

    A placement is one of DTensor's (`Shard(0)`, `Replicate()`) or its text (`"S(0)"`, `"R"`).
    """

    recipe: str | Mapping[str, str | None] | None = "auto"
    """`"ddp"`, `"zero2"`, `"fsdp"`, `"hsdp"`, `"megatron"`, two of them joined (`"fsdp+megatron"`: the last is
    for the last axis), or one per axis: `{"dp": "fsdp", "tp": "megatron"}`. `None`: only the placements below.
    `"auto"`: `megatron` on an axis named `tp`, `fsdp` on every other."""

    params: Placements | None = None
    """Placements of parameters by FQN or glob, such as `{"layers.*.wq.weight": {"tp": Shard(0)}}`. They come
    before any recipe."""

    inputs: Placements | None = None
    """Placements of inputs by path, such as `{"tokens": {"dp": Shard(0)}}`."""

    outputs: Placements | None = None
    """Placements of outputs by path. By default an output is this rank's part on data axes, whole on others."""

    mixed_precision: MixedPrecisionPolicy | None = None
    """As for FSDP2: parameters are stored as they are, cast to `param_dtype` before they are gathered, and their
    gradients reduced in `reduce_dtype`. Fewer bytes and faster products for fewer digits."""

    reshard_after_forward: bool = True
    """Whether `fsdp` frees gathered parameters after the forward and gathers them again in the backward: less
    memory for one more gather. `False` is what `zero2` does."""

    loss: Literal["mean", "sum"] = "mean"
    """For a loss that is computed outside of the model, from this rank's part of an output: whether the loss of the
    global batch is the mean over ranks (as DDP and FSDP average gradients) or their sum."""

    bucket_bytes: int = BUCKET_BYTES
    """How many bytes one collective of parameters, or of gradients, may bring to a rank: fewer messages for more
    memory. 0: one collective per parameter."""

    unknown_ops: Literal["replicate", "error"] = "replicate"
    """An op without a sharding rule runs on whole tensors, with a remark, or is an error."""

    compile: Literal["inductor", "eager"] = "inductor"
    """Compile with Inductor: faster steps, slower start. Or run the graphs op by op."""

    pipeline: tuple[Pass, ...] | None = None
    """Passes to run instead of `default_pipeline(...)`."""

    dump: str | PathLike[str] | None = None
    """A folder for the graph after every pass that changed it; `AUTOSHARD_DUMP` where not given."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("loss", self.loss, ("mean", "sum")),
            ("unknown_ops", self.unknown_ops, ("replicate", "error")),
            ("compile", self.compile, ("inductor", "eager")),
        ):
            if value not in known:
                raise UserError(f"Options({name}={value!r}): choose {' or '.join(map(repr, known))}")
