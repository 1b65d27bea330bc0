"""What a user may choose; every field says what it trades."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from types import NoneType
from typing import Literal

import torch.distributed.tensor as dt
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.config.validation import check_choice, check_count, check_kind, is_mapping_by_name, is_seconds, shown
from passes.base import Pass
from passes.bucket_collectives import BUCKET_BYTES
from passes.errors import ConstraintError, RecipeError, UserError
from passes.hardware.hardware import Hardware

USABLE_MEMORY = 0.9  # share of a device's memory: the rest is for allocator, kernels and communication libraries
Placements = Mapping[str, Mapping[str, dt.Placement | str]]  # name or glob -> axis -> placement


HARDWARE = (
    "a preset such as 'h100', a file that `python -m autoshard calibrate` wrote, an autoshard.Hardware, 'auto', or None for "
    "unknown figures"
)
PRECISION = "a policy: torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), or None"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How communication is hidden by computation: `Options(overlap=Overlap(split_matmuls=False))`."""

    bucket_bytes: int = BUCKET_BYTES
    """Bytes that one collective of parameters, or of gradients, may bring to a rank at most. Messages are joined in the
    size with the shortest predicted step, where joining pays at all; on devices whose figures are not known, up to a
    sixteenth of this. 0: one collective per parameter."""

    split_matmuls: bool = True
    """Cut a matrix product, and the gather that it reads or the reduction of what it makes, into chunks that are computed
    and sent side by side, where that is predicted to pay. Sums of a product's rows are the same; a backend may add up a
    smaller product in another order. `False`: each product and message is whole."""

    symmetric_memory: bool = False
    """With `split_matmuls`, on CUDA: where the ranks of a group reach each other's memory (NVLink), make one of PyTorch's
    operators of a gather and the products that read it, or of a product and its reduce-scatter, where that is predicted to
    be faster than chunks. It sends with copies, beside the products; it takes memory that no allocator counts."""

    def __post_init__(self) -> None:
        check_count("Overlap", "bucket_bytes", self.bucket_bytes, "bytes")
        check_choice("Overlap", "split_matmuls", self.split_matmuls, (True, False))
        check_choice("Overlap", "symmetric_memory", self.symmetric_memory, (True, False))


@dataclass(frozen=True)
class Dump:
    """What is written of the graphs, and where: `Options(dump=Dump("folder", mode="diff"))`."""

    folder: str | PathLike[str]

    mode: Literal["full", "diff"] = "full"
    """Whole graphs, which can be read back, or after the first what each pass changed."""

    ranks: Literal["first", "all"] = "first"
    """The first rank's files, or a folder for each rank."""

    def __post_init__(self) -> None:
        check_kind("Dump", "folder", self.folder, (str, PathLike), "the path of a folder")
        check_choice("Dump", "mode", self.mode, ("full", "diff"))
        check_choice("Dump", "ranks", self.ranks, ("first", "all"))


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to distribute a model.

    A placement is one of DTensor's (`Shard(0)`, `Replicate()`) or its text (`"S(0)"`, `"R"`).
    """

    recipe: str | Mapping[str, str | None] | None = "auto"
    """`"auto"`: the layouts with the shortest predicted step, searched for beside all experts' recipes; on hardware whose
    figures are not known, `megatron` on an axis named `tp` and `fsdp` on those that carry data by their name (`dp`, `data`,
    `fsdp`, ...). Or an expert's: `"ddp"`,
    `"zero2"`, `"fsdp"`, `"hsdp"`, `"megatron"`, two of them joined (`"fsdp+megatron"`: the last is for the last axis), or
    one per axis: `{"dp": "fsdp", "tp": "megatron"}`. `None`: only the placements below."""

    hardware: str | Hardware | None = "auto"
    """What a step is predicted for, on a DeviceMesh or a mesh that names no hardware: a preset such as `"h100"`, a file that
    `python -m autoshard calibrate` wrote, a `Hardware`, or `None` for unknown figures. `"auto"`: what the mesh names
    (`Mesh("dp=8", hardware="h100")`), else this machine's. Where both are given they have to be the same."""

    memory_limit: int | str | None = None
    """Memory of one device that a plan may use at its peak: bytes, or text such as `"60GB"` or `"60GiB"`. `None`: nine
    tenths of the hardware's, for what allocators and libraries take. Less memory for more communication."""

    optimizer: Literal["adamw", "sgd"] | None = "adamw"
    """What the predicted memory and step time count for the optimizer: AdamW's two states per parameter, none for
    SGD; `None`: no update at all."""

    time_limit: float | None = None
    """Seconds that the search after capture may take: stating the problem, solving it, simulating its plans and recipes'. The
    best plan so far counts, with the gap that was proven by then; the plan's candidates say what was left out. A phase that
    has started is finished, and the search goes on until one plan fits: 0 asks for the first that does. Without a limit the
    same model, mesh and options give the same plan everywhere."""

    params: Placements | None = None
    """Placements of parameters by FQN or glob, such as `{"layers.*.wq.weight": {"tp": Shard(0)}}`; of several that match
    a name, the last counts. They come before any recipe."""

    inputs: Placements | None = None
    """Placements of inputs by path, such as `{"tokens": {"dp": Shard(0)}}`."""

    outputs: Placements | None = None
    """Placements of outputs by path. By default an output is this rank's part on data axes, whole on others."""

    mixed_precision: MixedPrecisionPolicy | None = None
    """As for FSDP2: parameters are stored as they are, cast to `param_dtype` before they are gathered, and their
    gradients reduced in `reduce_dtype`. Fewer bytes and faster products for fewer digits."""

    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Whether gathered parameters are freed after the forward and gathered again in the backward: less memory for one more
    gather. `True` (FSDP's FULL_SHARD) and `False` (its SHARD_GRAD_OP) hold for all that is gathered, by a recipe or by the
    search. `"auto"`: `fsdp` frees them, `zero2` does not, and the search keeps those that are worth it and fit."""

    recompute: Literal["auto", "none", "block"] = "auto"
    """What of the forward is computed again in the backward, so that it need not be kept. `"none"`: what costs next to
    nothing. `"block"`: all of a layer but what the next one takes (a layer is a module of a list; in a model without
    lists, a child of the model): the least memory for a forward more. `"auto"`: as `"none"` where that fits into
    `memory_limit`, else what costs least time of what makes it fit, collectives included."""

    loss: Literal["mean", "sum"] = "mean"
    """For a loss that is computed outside of the model, from this rank's part of an output: whether the loss of the
    global batch is the mean over ranks (as DDP and FSDP average gradients) or their sum."""

    overlap: bool | Overlap = True
    """Issue collectives early and await them late, in the order with the shortest predicted step, as far as `memory_limit`
    allows; `Overlap(...)` says how. `False`: each is awaited where it is issued, for less memory and slower steps."""

    unknown_ops: Literal["replicate", "error"] = "replicate"
    """An op without a sharding rule runs on whole tensors, with a remark, or is an error."""

    compile: Literal["inductor", "eager"] = "inductor"
    """Compile with Inductor: faster steps, slower start. Or run the graphs op by op."""

    passes: tuple[Pass, ...] | None = None
    """Passes to run instead of `autoshard.phases.default_passes()`. They place values themselves: with `recipe="auto"` nothing is
    searched for, unless a `passes.solve.Solve()` is among them."""

    dump: str | PathLike[str] | Dump | Literal[False] | None = None
    """A folder for the graph after every pass that changed it, and for what is compiled, or a `Dump`. `None`: as the
    environment says (`AUTOSHARD_DUMP`, `AUTOSHARD_DUMP_MODE`, `AUTOSHARD_DUMP_RANKS`). `False`: none."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("loss", self.loss, ("mean", "sum")),
            ("reshard_after_forward", self.reshard_after_forward, ("auto", True, False)),
            ("recompute", self.recompute, ("auto", "none", "block")),
            ("optimizer", self.optimizer, ("adamw", "sgd", None)),
            ("unknown_ops", self.unknown_ops, ("replicate", "error")),
            ("compile", self.compile, ("inductor", "eager")),
        ):
            check_choice("Options", name, value, known)
        self._check_recipe()
        for name, placements in (("params", self.params), ("inputs", self.inputs), ("outputs", self.outputs)):
            _check_placements(name, placements)
        check_kind("Options", "hardware", self.hardware, (str, Hardware, NoneType), HARDWARE)
        check_kind("Options", "mixed_precision", self.mixed_precision, (MixedPrecisionPolicy, NoneType), PRECISION)
        self._check_passes()
        check_kind("Options", "overlap", self.overlap, (bool, Overlap), "True, False, or autoshard.Overlap(...)")
        if self.dump is not None and self.dump is not False:
            check_kind("Options", "dump", self.dump, (str, PathLike, Dump), "a folder, autoshard.Dump(folder, ...), or False")
        self._check_time_limit()
        self.memory_bytes(0)

    def _check_recipe(self) -> None:
        for axis, recipe in self.recipe.items() if isinstance(self.recipe, Mapping) else ():
            if not isinstance(axis, str) or not isinstance(recipe, str | NoneType):
                raise RecipeError(
                    f"Options(recipe={shown(self.recipe)}): give each axis the name of a recipe or None: {{'dp': 'fsdp'}}"
                )

    def _check_passes(self) -> None:
        if self.passes is None:
            return
        if not isinstance(self.passes, tuple) or not all(isinstance(one, Pass) for one in self.passes):
            raise UserError(
                f"Options(passes={shown(self.passes)}): give a tuple of passes, made as in "
                "(*autoshard.phases.default_pipeline(), MyPass()), or None for the default"
            )

    def _check_time_limit(self) -> None:
        if self.time_limit is not None and not is_seconds(self.time_limit):
            raise UserError(f"Options(time_limit={self.time_limit!r}): give seconds, 0 or more, or None for no limit")

    @property
    def hiding(self) -> Overlap | None:
        """Return how communication is hidden; None: it is not."""
        if isinstance(self.overlap, Overlap):
            return self.overlap
        return Overlap() if self.overlap else None

    @property
    def keeps_gathered(self) -> bool | None:
        """Return whether gathered parameters stay for the backward; None: as the recipe says, or the search finds."""
        return None if self.reshard_after_forward == "auto" else not self.reshard_after_forward

    def memory_bytes(self, available: int) -> int:
        """Return the memory limit in bytes, on a device that has `available`."""
        if self.memory_limit is None:
            return int(available * USABLE_MEMORY)
        if isinstance(self.memory_limit, int) and self.memory_limit > 0 and self.memory_limit is not True:
            return self.memory_limit
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B\s*", str(self.memory_limit))
        if match is None or isinstance(self.memory_limit, int):
            raise UserError(
                f"Options(memory_limit={self.memory_limit!r}): give bytes above 0, or text such as '60GB' or '60GiB'"
            )
        prefix = match[2] or ""
        return int(float(match[1]) * (1024 if prefix.endswith("i") else 1000) ** " KMGT".index(prefix[:1] or " "))


def _check_placements(what: str, given: object) -> None:
    """Check that names have mappings of axes to placements; which names and axes there are is not known yet."""
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
            if not isinstance(placement, dt.Placement | str):
                raise ConstraintError(
                    f"Options({what}=...): {name!r} is given {shown(placement)} on {axis!r}; use Shard(dim) or Replicate(), "
                    "or write 'S(dim)' or 'R'"
                )


def options_given(options: object) -> Options:
    """Return the options of a call, the defaults where none are given. Raises UserError for what is no `Options`."""
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise UserError(f"options={shown(options)}: give autoshard.Options(...), such as Options(recipe='fsdp')")
    return options
