"""Refuse what a sharded model cannot do in the modes of torch that transform, trace or check the code that they run."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import distributed

from passes._torch import in_forward_mode, in_transform
from passes.errors import UserError

COMPILED = (
    "a sharded model runs a program of its own, which is compiled already; leave out fullgraph=True, and torch.compile what "
    "is around the call"
)


def check_modes() -> None:
    """Raise UserError in a mode in which a program cannot run, or would silently compute something else."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise UserError(
            "anomaly mode looks for NaN with an op that DTensor gradients do not have; use "
            "torch.autograd.set_detect_anomaly(True, check_nan=False), or look for NaN on one device"
        )
    if in_transform():
        raise UserError(
            "a sharded model cannot be transformed by torch.func (vmap, grad, vjp, jvp, jacrev): it runs a program compiled "
            "for its forward and backward; call the transform inside of the model, or use backward() and torch.autograd.grad"
        )
    if in_forward_mode():
        raise UserError(
            "a sharded model has no forward-mode derivative: its program has a forward and a backward; use backward(), or "
            "compute what needs it on one device"
        )
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
        raise UserError(
            "a sharded model cannot be exported or traced: it is a compiled program already; export the model that it was "
            "made from, after loading its state_dict()"
        )


class Refusals(nn.Module):
    """Methods that a module inherits, and that a sharded one refuses."""

    def share_memory(self) -> Any:
        raise UserError(
            "the parameters of a sharded model cannot be put into shared memory: each rank has its own parts; share the model "
            "that it is made from before autoshard(...)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "a sharded model cannot be pickled: it holds process groups and compiled code; save its state_dict() with "
            "torch.distributed.checkpoint, and shard the model again after loading (copy.deepcopy makes a second one)"
        )

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        # DistributedDataParallel goes through the parameters of what it wraps, which may hold this model.
        if torch.compiler.is_compiling():  # dynamo cannot trace a look at the stack
            return super().named_modules(*args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_code.co_filename == nn.modules.module.__file__ and frame.f_back is not None:
            frame = frame.f_back
        if frame.f_code.co_filename == distributed.__file__:
            raise UserError(
                "a sharded model must not be wrapped in DistributedDataParallel, by itself or in another module: its gradients "
                "are those of the global batch already; use it as it is (with accelerate, prepare optimizer and data alone; "
                "with Lightning, give Trainer(strategy=ModelParallelStrategy(...)); transformers.Trainer counts on a loss per "
                "process: write the loop)"
            )
        return super().named_modules(*args, **kwargs)
