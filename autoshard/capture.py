"""An `nn.Module` and example arguments become one ATen graph of forward and backward, on fake tensors.

Dynamo reads the Python, AOTAutograd differentiates and functionalizes, Inductor's decompositions break up what
has no kernel of its own. The result is the flat graph that `passes.ir.graph` describes: every parameter, buffer
and tensor argument is a placeholder, used or not; every output, new buffer value and gradient is a result.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autoshard.capture_errors import capture_error, side_effect_error
from autoshard.fake_module import fake_module, fake_tensor
from autoshard.flat_call import flatten_call
from autoshard.garbage import uncollected
from autoshard.joint_graph import finish_graph
from autoshard.signature import Call, Signature, bind_call, format_leaf, is_constant
from passes._torch import TracedModule, fake_mode, lazy_code, select_decompositions, trace_joint, trace_module
from passes.errors import CaptureError
from passes.ir.graph import InputRole, input_of, placeholders

aten = torch.ops.aten

# Ops with a kernel of their own that shard better whole than in Inductor's pieces.
_WHOLE = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.cat.default,
        aten.embedding_dense_backward.default,
        aten.convolution_backward.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.max_pool3d_with_indices.default,
    }
)


@dataclass(frozen=True)
class Captured:
    """A module as a graph, with the way in and out.

    `parameters` are the FQNs of the PARAMETER placeholders in order, unused and frozen ones included; `tied`
    maps every other name of a tied parameter to the one in the graph. `constants` holds the values of those
    BUFFER placeholders that are no buffers of the module: plain tensor attributes, tensors of the surrounding
    code, literals. A constant is on meta if the module's attribute is.
    """

    graph_module: GraphModule
    parameters: tuple[str, ...]
    tied: dict[str, str]
    constants: dict[str, torch.Tensor]
    signature: Signature


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    training: bool,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype | None = None,
    cast_inputs: bool = True,
) -> Captured:
    """Capture one call of `module` at the shapes of the arguments; neither is touched or run.

    With `training`, the graph is forward and backward if any output needs a gradient, otherwise the forward as
    under `torch.no_grad()`. Module and arguments may be real, fake or on meta; the graph is one of `device`. It
    takes contiguous tensors, whatever the strides of the examples.

    With `compute_dtype`, floating-point parameters and (with `cast_inputs`) arguments are taken to be of that dtype
    in the graph; `signature` says what was given.

    Raises CaptureError for what cannot be one graph.
    """
    call = _bind(module, args, kwargs or {})
    mode, place = fake_mode(), torch.device(device)

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        return fake_tensor(tensor, mode, place)

    fake = fake_module(module, mode, place, compute_dtype)
    leaves = {
        path: fake_tensor(leaf, mode, place, compute_dtype if cast_inputs else None) if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in call.leaves.items()
    }
    try:
        with torch.inference_mode(mode=False), torch.set_grad_enabled(training), lazy_code(), uncollected():
            traced = _trace(_Call(fake.module), *call.with_leaves(leaves))
            flat = flatten_call(traced, fake, call, leaves, fake_of)
            joint = trace_joint(flat.graph_module, tuple(flat.tensors.values()), select_decompositions(whole=_WHOLE))
    except CaptureError:
        raise
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise capture_error(error) from error
    fqns = {id(child): fqn for fqn, child in fake.module.named_modules()}
    constants = flat.constants | finish_graph(joint, flat, fqns)
    parameters = placeholders(joint.graph_module.graph, InputRole.PARAMETER)
    return Captured(
        joint.graph_module, tuple(input_of(node).name for node in parameters), fake.tied, constants, flat.signature
    )


def _trace(call: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
    """The trace of a call that changes no Python object.

    Constants that a first call sets on an object beside the modules (a flag of a config, which the fake module has a
    copy of) are set here, as that call would, if a second call then changes nothing any more.
    """
    traced = trace_module(call, args, kwargs)
    for effect in traced.side_effects:
        if not effect.constants or isinstance(effect.changed, nn.Module):
            raise side_effect_error(effect)
    if not traced.side_effects:
        return traced
    before = [(vars(effect.changed), dict(vars(effect.changed))) for effect in traced.side_effects]
    for effect in traced.side_effects:
        for name, value in effect.constants.items():
            setattr(effect.changed, name, value)
    again = trace_module(call, args, kwargs)
    for effect in again.side_effects:
        for attributes, held in before:
            attributes.clear()
            attributes.update(held)
        raise side_effect_error(effect)
    return again


class _Call(nn.Module):
    """Calls the module under a name that cannot clash with those of its children."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.autoshard_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Dynamo gives no graph where nothing is computed; the second result makes sure that something is.
        return self.autoshard_module(*args, **kwargs), torch.zeros(())


def _bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    signature = inspect.signature(module.forward)
    try:
        call = bind_call(signature, args, kwargs)
    except TypeError as error:
        given = ", ".join([*map(_brief, args), *(f"{key}={_brief(value)}" for key, value in kwargs.items())])
        raise CaptureError(f"{type(module).__name__}.forward{signature} cannot take ({given}): {error}") from error
    for path, leaf in call.leaves.items():
        if not isinstance(leaf, torch.Tensor) and not is_constant(leaf):
            raise CaptureError(
                f"argument {path} is a {type(leaf).__name__}, which is neither a tensor nor a constant; pass tensors "
                f"in tuples, lists, dicts or named tuples, or register the class with torch.export.register_dataclass"
            )
    return call


def _brief(value: object) -> str:
    return format_leaf(value) if isinstance(value, torch.Tensor) or is_constant(value) else type(value).__name__
