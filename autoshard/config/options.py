"""The options of a plan, each documented with what it trades."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from types import NoneType
from typing import Literal

import torch
import torch.distributed.tensor as dt
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.config.validation import check_choice, check_count, check_kind, is_mapping_by_name, is_seconds, shown
from passes.base import Pass
from passes.bucket_collectives import BUCKET_BYTES
from passes.errors import ConstraintError, RecipeError, UserError
from passes.hardware.hardware import Hardware, hardware_named
from passes.ir.layout import Placement, Shard

USABLE_MEMORY = 0.9  # share of a device's memory; the rest is left to the allocator, kernels and NCCL
MOST_BYTES = 2**63  # no device addresses more
MAX_PROGRAMS = 32  # a program takes seconds to minutes: more are a sign of sizes or numbers that never repeat
Placements = Mapping[str, Mapping[str, dt.Placement | str]]  # name or glob -> axis -> placement
Given = Mapping[str, Mapping[str, dt.Placement | Placement | str]]  # the same, also with those of a plan's layouts


HARDWARE = (
    "a preset such as 'h100', a file that `python -m autoshard calibrate` wrote, an autoshard.Hardware, 'auto', or None for "
    "unknown figures"
)
PRECISION = "a policy: torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), or None"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Settings for hiding communication behind computation: `Options(overlap=Overlap(split_matmuls=False))`."""

    bucket_bytes: int = BUCKET_BYTES
    """Maximum bytes that one bucketed collective of parameters or gradients may bring to a rank. Buckets have the size
    with the shortest predicted step, if bucketing pays at all; on unknown hardware, at most a sixteenth of this. 0:
    one collective per parameter.
    """

    split_matmuls: bool = True
    """Split a matrix product, together with the gather that it reads or the reduction of its result, into chunks that
    are computed and sent concurrently, if that is predicted to pay. Each row is still summed in full, but a backend
    may add the terms of a smaller product in another order. `False`: products and messages stay whole.
    """

    symmetric_memory: bool = False
    """Replace a gather and the products that read it, or a product and its reduce-scatter, by one of PyTorch's fused
    operators where that is predicted to be faster than chunks. They send with copies, concurrently with the products,
    and use memory outside of the allocator. Needs `split_matmuls`, CUDA, and a group whose ranks reach each other's
    memory (NVLink).
    """

    def __post_init__(self) -> None:
        check_count("Overlap", "bucket_bytes", self.bucket_bytes, "bytes")
        check_choice("Overlap", "split_matmuls", self.split_matmuls, (True, False))
        check_choice("Overlap", "symmetric_memory", self.symmetric_memory, (True, False))


@dataclass(frozen=True)
class Dump:
    """The folder for graphs, and how much of them to write: `Options(dump=Dump("folder", mode="diff"))`."""

    folder: str | PathLike[str]

    mode: Literal["full", "diff"] = "full"
    """Whole graphs, which can be read back, or after the first one only what each pass changed."""

    ranks: Literal["first", "all"] = "first"
    """Files of the first rank only, or a folder for each rank."""

    def __post_init__(self) -> None:
        check_kind("Dump", "folder", self.folder, (str, PathLike), "the path of a folder")
        check_choice("Dump", "mode", self.mode, ("full", "diff"))
        check_choice("Dump", "ranks", self.ranks, ("first", "all"))


@dataclass(frozen=True)
class Bucket:
    """Padding of an input to one of a few sizes: `Options(buckets={"tokens": Bucket(1, (64, 128), fill=0)})`."""

    dim: int
    """The dim that is padded at its end, on each rank: of this rank's part, if an axis splits the dim."""

    sizes: tuple[int, ...]
    """The sizes it is padded to: the smallest that is large enough. A larger input is not padded."""

    fill: bool | int | float
    """The value that padding has. It has to be one that the model ignores, such as -100 in labels: a mean over padding
    is another mean."""

    def __post_init__(self) -> None:
        if not _is_whole(self.dim):
            raise UserError(f"Bucket(dim={shown(self.dim)}): give a dim, such as 1")
        if not isinstance(self.sizes, tuple) or not self.sizes or not all(_is_whole(size) and size > 0 for size in self.sizes):
            raise UserError(f"Bucket(sizes={shown(self.sizes)}): give sizes above 0 in a tuple, such as (128, 256)")
        check_kind("Bucket", "fill", self.fill, (bool, int, float), "the number that padding has, such as -100")


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that say how to distribute a model.

    A placement is one of DTensor's (`Shard(0)`, `Replicate()`) or its text (`"S(0)"`, `"R"`).
    """

    recipe: str | Mapping[str, str | None] | None = "auto"
    """`"auto"`: search for the layouts with the shortest predicted step, and compare them with all recipes; on unknown
    hardware, use `megatron` on an axis named `tp`, `fsdp_context` on one named `cp` or `context`, and `fsdp` on axes with a
    data-parallel name (`dp`, `data`, `fsdp`, ...). Or a recipe: `"ddp"`, `"zero2"`, `"fsdp"`, `"hsdp"`, `"context"`,
    `"megatron"`, two of them joined (`"fsdp+megatron"`: the last is for the last axis), or one per axis:
    `{"dp": "fsdp", "tp": "megatron"}`. `None`: only the placements below.
    """

    hardware: str | Hardware | None = "auto"
    """Hardware that a step is predicted for, if the mesh is a DeviceMesh or names none: a preset such as `"h100"`, a
    file that `python -m autoshard calibrate` wrote, a `Hardware`, or `None` for unknown hardware. `"auto"`: the
    hardware that the mesh names (`Mesh("dp=8", hardware="h100")`), else this machine's. If both are given, they have
    to be the same.
    """

    memory_limit: float | str | None = None
    """Peak memory of one device that a plan may use: bytes, or text such as `"60GB"` or `"60GiB"`. `None`: nine tenths
    of the device's memory, since allocators and libraries need some. A lower limit costs more communication.
    """

    optimizer: Literal["adamw", "sgd"] | None = "adamw"
    """Optimizer whose memory and time are part of the prediction: AdamW's two states per parameter, none for SGD;
    `None`: no update at all.
    """

    time_limit: float | None = None
    """Seconds for the search after capture: preparing the problem, solving it, and simulating its plans and the
    recipes. The best plan found in that time is used, with the gap proven by then; the plan's candidates say what was
    left out. A phase that has started is finished, and the search goes on until one plan fits: 0 requests the first
    that does. Without a limit the same model, mesh and options give the same plan everywhere.
    """

    params: Placements | None = None
    """Placements of parameters by FQN or glob, such as `{"layers.*.wq.weight": {"tp": Shard(0)}}`; if several match a
    name, the last one counts. They take precedence over any recipe. The placements of another plan's layouts are taken, too.
    """

    inputs: Placements | None = None
    """Placements of inputs by path, such as `{"tokens": {"dp": Shard(0)}}`."""

    outputs: Placements | None = None
    """Placements of outputs by path. By default an output is this rank's part on data-parallel axes, and whole on
    others.
    """

    mixed_precision: MixedPrecisionPolicy | None = None
    """Mixed precision as in FSDP2: parameters are stored in their own dtype, cast to `param_dtype` before they are
    gathered, and their gradients reduced in `reduce_dtype`. Fewer bytes and faster products at lower precision.
    """

    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free gathered parameters after the forward and gather them again in the backward: less memory for one more
    gather. `True` (FSDP's FULL_SHARD) and `False` (its SHARD_GRAD_OP) apply to all gathered parameters, of a
    recipe or of the search. `"auto"`: `fsdp` frees them, `zero2` does not, and the search keeps those that are worth
    it and fit.
    """

    recompute: Literal["auto", "none", "block"] = "auto"
    """Values of the forward that the backward recomputes instead of keeping them. `"none"`: only those that cost next
    to nothing. `"block"`: everything in a layer but its inputs (a layer is a module of a list; in a model without
    lists, a child of the model): the least memory, for one more forward. `"auto"`: as `"none"` if that fits into
    `memory_limit`, else the values whose recomputation takes the least time, collectives included.
    """

    loss: Literal["mean", "sum"] = "mean"
    """Reduction over ranks of a loss that is computed outside of the model, from this rank's part of an output: the
    loss of the global batch is the mean of theirs (as DDP and FSDP average gradients) or the sum.
    """

    overlap: bool | Overlap = True
    """Issue collectives early and await them late, in the order with the shortest predicted step that `memory_limit`
    allows; `Overlap(...)` has the details. `False`: each is awaited where it is issued, for less memory and slower
    steps.
    """

    unknown_ops: Literal["replicate", "error"] = "replicate"
    """Treatment of an op without a sharding rule: run it on whole tensors, with a remark, or raise an error."""

    compile: Literal["inductor", "eager"] = "inductor"
    """Compile with Inductor (faster steps, slower start), or run the graphs op by op."""

    rank_timeout: float | None = None
    """Seconds that a rank may come later than another to a call of the model, or to a collective inside of it; then all
    that wait raise a `DistributedError` that names the rank and what it last did. A warning comes after half of that time,
    or 30 s. `None`: the timeout of the mesh's process groups.
    """

    passes: tuple[Pass, ...] | None = None
    """Passes to run instead of `autoshard.phases.default_passes()`. They have to place values themselves: with
    `recipe="auto"` there is no search, unless a `passes.solve.Solve()` is among them.
    """

    max_programs: int = MAX_PROGRAMS
    """Programs that one model may have, at least 1. A call with other shapes, arguments that are no tensors, or another state of
    the model (training or evaluation, a flag that was changed) than any before needs a program of its own, which takes
    seconds; a call that would exceed the number is an error that says what varied.
    """

    buckets: Mapping[str, Bucket] | None = None
    """Inputs to pad, by path or glob, so that few programs serve many sizes:
    `{"tokens": Bucket(1, (64, 128), fill=0), "labels": Bucket(1, (64, 128), fill=-100)}`. Outputs keep the padding.
    """

    progress: bool = True
    """Show on a terminal, on the first rank, what is being planned, made and compiled, and for how long. The log of a job of
    several ranks gets a line before and after each program; pipes and notebooks of one process stay quiet.
    """

    dump: str | PathLike[str] | Dump | Literal[False] | None = None
    """A folder, or a `Dump`, for the graph after every pass that changed it and for the compiled graphs. `None`: use
    the environment (`AUTOSHARD_DUMP`, `AUTOSHARD_DUMP_MODE`, `AUTOSHARD_DUMP_RANKS`). `False`: no dump.
    """

    def __post_init__(self) -> None:
        _check(self)
        self.memory_bytes(0)
        for name in ("params", "inputs", "outputs"):
            object.__setattr__(self, name, _with_layouts_as_text(getattr(self, name)))

    @property
    def hiding(self) -> Overlap | None:
        """Return the settings for hiding communication; None: it is not hidden."""
        if isinstance(self.overlap, Overlap):
            return self.overlap
        return Overlap() if self.overlap else None

    @property
    def keeps_gathered(self) -> bool | None:
        """Return whether gathered parameters are kept for the backward; None: the recipe or the search decides."""
        return None if self.reshard_after_forward == "auto" else not self.reshard_after_forward

    def memory_bytes(self, available: int) -> int:
        """Return the memory limit in bytes, on a device that has `available`."""
        limit = self.memory_limit
        if limit is None:
            return int(available * USABLE_MEMORY)
        size = _bytes_in(limit) if isinstance(limit, str) else limit
        is_number = isinstance(size, int | float) and not isinstance(size, bool)
        if not is_number or not 1 <= size < MOST_BYTES or size != int(size):
            raise UserError(
                f"Options(memory_limit={self.memory_limit!r}): give bytes above 0, or text such as '60GB' or '60GiB'"
            )
        return int(size)


def _bytes_in(text: str) -> float:
    """Return the whole bytes that "60GB" stands for; nan for other text, and for "60Gb", which are bits."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B\s*", text, re.IGNORECASE)
    if match is None or re.search("[KMGT]i?b", text):
        return math.nan
    prefix = (match[2] or "").upper()
    unit = float((1024 if prefix.endswith("I") else 1000) ** " KMGT".index(prefix[:1] or " "))
    return float(match[1]) * unit // 1


def _check(given: Options) -> None:
    """Raise UserError for a value that no option takes."""
    for name, value, known in (
        ("loss", given.loss, ("mean", "sum")),
        ("reshard_after_forward", given.reshard_after_forward, ("auto", True, False)),
        ("recompute", given.recompute, ("auto", "none", "block")),
        ("optimizer", given.optimizer, ("adamw", "sgd", None)),
        ("unknown_ops", given.unknown_ops, ("replicate", "error")),
        ("compile", given.compile, ("inductor", "eager")),
        ("progress", given.progress, (True, False)),
    ):
        check_choice("Options", name, value, known)
    _check_recipe(given)
    for name, placements in (("params", given.params), ("inputs", given.inputs), ("outputs", given.outputs)):
        _check_placements(name, placements)
    check_kind("Options", "hardware", given.hardware, (str, Hardware, NoneType), HARDWARE)
    if isinstance(given.hardware, str) and given.hardware != "auto":
        hardware_named(given.hardware)
    check_kind("Options", "mixed_precision", given.mixed_precision, (MixedPrecisionPolicy, NoneType), PRECISION)
    _check_dtypes(given.mixed_precision)
    _check_passes(given)
    check_kind("Options", "overlap", given.overlap, (bool, Overlap), "True, False, or autoshard.Overlap(...)")
    if given.dump is not None and given.dump is not False:
        check_kind("Options", "dump", given.dump, (str, PathLike, Dump), "a folder, autoshard.Dump(folder, ...), or False")
    _check_times(given)
    _check_programs(given)


def _check_recipe(given: Options) -> None:
    if given.recipe == {}:
        raise RecipeError(
            "Options(recipe={}): name the recipe of an axis, such as {'dp': 'fsdp'}, or give recipe=None to take only the "
            "placements of params=, inputs= and outputs="
        )
    for axis, recipe in given.recipe.items() if isinstance(given.recipe, Mapping) else ():
        if not isinstance(axis, str) or not isinstance(recipe, str | NoneType):
            raise RecipeError(
                f"Options(recipe={shown(given.recipe)}): give each axis the name of a recipe or None: {{'dp': 'fsdp'}}"
            )


def _check_dtypes(policy: MixedPrecisionPolicy | None) -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype") if policy is not None else ():
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UserError(
                f"MixedPrecisionPolicy({name}={shown(dtype)}): give a floating point dtype such as torch.bfloat16, or None"
            )


def _check_passes(given: Options) -> None:
    if given.passes is None:
        return
    if not isinstance(given.passes, tuple) or not all(isinstance(one, Pass) for one in given.passes):
        raise UserError(
            f"Options(passes={shown(given.passes)}): give a tuple of passes, made as in "
            "(*autoshard.phases.default_passes(), MyPass()), or None for the default"
        )


def _check_programs(given: Options) -> None:
    check_count("Options", "max_programs", given.max_programs, "programs", least=1)
    buckets = {} if given.buckets is None else given.buckets
    if not is_mapping_by_name(buckets) or not all(isinstance(one, Bucket) for one in buckets.values()):
        raise UserError(
            f"Options(buckets={shown(given.buckets)}): give autoshard.Bucket(dim, sizes, fill) by the input's path: "
            "{'tokens': Bucket(1, (128, 256), fill=0)}"
        )


def _check_times(given: Options) -> None:
    if given.rank_timeout is not None and not (is_seconds(given.rank_timeout) and given.rank_timeout > 0):
        raise UserError(
            f"Options(rank_timeout={shown(given.rank_timeout)}): give seconds, more than 0, or None for the timeout of the "
            "process groups"
        )
    if given.time_limit is not None and not is_seconds(given.time_limit):
        raise UserError(f"Options(time_limit={given.time_limit!r}): give seconds, 0 or more, or leave it out for no limit")


def _check_placements(what: str, given: object) -> None:
    """Check that names map to axes and axes to placements; which names and axes exist is not known yet."""
    if given is None:
        return
    if not isinstance(given, Mapping) or not is_mapping_by_name(given):
        raise ConstraintError(
            f"Options({what}={shown(given)}): give placements by name and axis: {{'name': {{'dp': Shard(0)}}}}"
        )
    for name, axes in given.items():
        if not isinstance(axes, Mapping) or not is_mapping_by_name(axes):
            raise ConstraintError(
                f"Options({what}=...): {name!r} is given {shown(axes)}; say on which axis: {{{name!r}: {{'dp': Shard(0)}}}}"
            )
        for axis, placement in axes.items():
            if not isinstance(placement, dt.Placement | Placement | str):
                raise ConstraintError(
                    f"Options({what}=...): {name!r} is given {shown(placement)} on {axis!r}; use Shard(dim) or Replicate(), "
                    "or write 'S(dim)' or 'R'"
                )


def _with_layouts_as_text(given: Given | None) -> Given | None:
    """Return placements with those of a plan's layouts as text.

    Axes that shard one dim are sorted from the outermost, as each axis of a text splits what the axes before it left.
    """
    if given is None or not any(isinstance(one, Placement) for axes in given.values() for one in axes.values()):
        return given
    return {
        name: {
            axis: str(one) if isinstance(one, Placement) else one
            for axis, one in sorted(axes.items(), key=lambda pair: pair[1].outer if isinstance(pair[1], Shard) else 0)
        }
        for name, axes in given.items()
    }


def options_given(options: object) -> Options:
    """Return the options of a call, or the defaults if none are given. Raises UserError if they are not `Options`."""
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise UserError(f"options={shown(options)}: give autoshard.Options(...), such as Options(recipe='fsdp')")
    return options
