"""Say of a model that fails for a call what may be its cause: how inputs were joined or given, or added parameters."""

from __future__ import annotations

import fnmatch
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture.capture import capture_call
from autoshard.capture.capture_errors import AS_ON_ONE_DEVICE
from autoshard.capture.signature import bind_call
from autoshard.config.options import Options
from autoshard.plans.plan_values import Value
from autoshard.runtime.calls.programs import FirstCall
from autoshard.runtime.global_call import Splits, batch_of, global_call, tensors_of
from passes.errors import CaptureError, UserError

SHOWN = 2  # added parameters that a message lists
UNPACKED: dict[object, str] = {tuple: "model(*model.shard(x))", dict: "model(**model.shard(x=x))"}  # by type


def with_cause(
    error: CaptureError, call: FirstCall, splits: Splits, known: Mapping[str, Value], *, device: str, options: Options
) -> CaptureError:
    """Return the error of a call with what is not the model's own: parameters beside those that are `known`, or inputs that were
    joined, if the model does not fail for this rank's part as well. Else return the error itself.
    """
    if error.for_arguments and (added := _added(call.module, known)):
        return with_added(error, added)
    kind = type(call.args[0]) if len(call.args) == 1 and not call.kwargs else None
    if error.for_arguments and kind in UNPACKED:
        return with_packed(error, UNPACKED[kind])
    joined = with_joined(error, call.module, call.args, call.kwargs, splits)
    return error if joined is None or _fails_for_part(call, splits, device, options) else joined


def with_joined(
    error: CaptureError, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], splits: Splits
) -> CaptureError | None:
    """Return the error of a model that fails for global inputs, with how they were made of this rank's; None if they are its
    own, or as the user says."""
    tensors = tensors_of(bind_call(inspect.signature(module.forward), args, dict(kwargs)).leaves)
    batch = batch_of(tensors)
    known = () if splits.is_planned else tuple(splits.inputs or {})
    joined = [
        path
        for path, one in tensors.items()
        if one.shape[:1] != splits.whole_shape(path, one, batch)[:1]
        and not any(fnmatch.fnmatchcase(path, pattern) for pattern in known)
    ]
    if not error.for_arguments or not joined:
        return None
    wide = [path for path, one in tensors.items() if path != joined[0] and one.dim() > 1]
    others = [path for path in wide if path not in joined and batch in tensors[path].shape] or wide[-1:] or joined[:1]
    axes = [splits.mesh.names[axis] for axis in splits.data_axes or (0,)]
    dims = {path: next((d for d, size in enumerate(tensors[path].shape) if d and size == batch), 1) for path in others}
    given = {path: dict.fromkeys(axes, f"S({dim})") for path, dim in dims.items()}
    text, place = _parted(error)
    return CaptureError(
        f"{text}. Dim 0 of {', '.join(map(repr, joined))} was taken for the batch, and the ranks' parts were joined "
        f"there; where the batch is another dim, give Options(inputs={given}), or 'R' for one that has no batch{place}",
        for_arguments=True,
    )


def with_added(error: CaptureError, names: Sequence[str]) -> CaptureError:
    """Return the error of a model that fails after the parameters `names` were added to it: it may be due to their shapes."""
    text, place = _parted(error)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return CaptureError(
        f"{text.replace(AS_ON_ONE_DEVICE, '')}. Parameters were added after the model was sharded: "
        f"{', '.join(map(repr, names[:SHOWN]))}{more}; where their shapes are those of a rank's part of another parameter, add "
        f"them before autoshard(...){place}",
        for_arguments=True,
    )


def with_packed(error: CaptureError, unpacked: str) -> CaptureError:
    """Return the error of a model that fails for one tuple or dict, which `shard` may have returned, with how to unpack it."""
    text, place = _parted(error)
    return CaptureError(
        f"{text}. The call has one argument, which is a container; where model.shard returned it, unpack it: {unpacked}{place}",
        for_arguments=True,
    )


def _parted(error: CaptureError) -> tuple[str, str]:
    """Return the text of an error without its full stop, and the user's line at its end."""
    text, newline, place = str(error).rpartition("\n  ") if "\n  " in str(error) else (str(error), "", "")
    return text.rstrip("."), f"{newline}{place}"


def _fails_for_part(call: FirstCall, splits: Splits, device: str, options: Options) -> bool:
    """Return whether the model fails for the inputs as this rank gives them."""
    args, kwargs = global_call(call.module, call.args, call.kwargs, Splits(splits.mesh, (), None))
    policy = options.mixed_precision or MixedPrecisionPolicy()
    try:
        capture_call(
            call.module,
            args,
            kwargs,
            training=call.gradients,
            device=device,
            compute_dtype=policy.param_dtype,
            cast_inputs=policy.cast_forward_inputs,
        )
    except UserError:
        return True
    return False


def _added(module: nn.Module, known: Mapping[str, Value]) -> list[str]:
    """Return the parameters that are not `known`, but for those that only have another name, as in a wrapper; none if none is
    known.
    """
    now = dict(module.named_parameters()) if known else {}
    gone = Counter(value.shape for name, value in known.items() if name not in now)
    added = []
    for name, parameter in now.items():
        shape = tuple(parameter.shape)
        if name not in known and gone[shape]:
            gone[shape] -= 1
        elif name not in known:
            added.append(name)
    return added
