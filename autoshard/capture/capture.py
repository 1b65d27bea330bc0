"""Capture an `nn.Module` and example arguments as one ATen graph of forward and backward, on fake tensors.

Dynamo traces the Python code, AOTAutograd differentiates and functionalizes, and Inductor's decompositions break up
ops that have no kernel of their own. The result is the flat graph that `passes.ir.graph` describes: every parameter,
buffer and tensor argument is a placeholder, used or not; every output, new buffer value and gradient is a result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autoshard.capture.capture_errors import capture_error, marks_leaf, side_effect_error, takes_lock
from autoshard.capture.fake_module import fake_module, fake_tensor
from autoshard.capture.flat_call import FlatCall, flatten_call
from autoshard.capture.garbage import uncollected
from autoshard.capture.joint_graph import finish_graph
from autoshard.capture.signature import Call, Signature, bind_call, format_leaf, is_constant
from passes._torch import (
    TracedModule,
    fake_mode,
    lazy_code,
    rehearsed,
    select_decompositions,
    trace_joint,
    trace_module,
)
from passes.errors import CaptureError
from passes.ir.graph import InputRole

aten = torch.ops.aten

# Ops with a kernel of their own that shard better than their decompositions.
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


@dataclass(frozen=True, eq=False)
class Captured:
    """A module captured as a graph, with the signature of its calls.

    `call` is dynamo's graph of the forward alone; the joint graph is traced from it on first use. `modules` maps the
    id of each traced module to its name. `tied` maps every other name of a tied parameter to the one in the graph. `names`
    are those that the traced code reads (None: not known).
    """

    call: FlatCall
    modules: Mapping[int, str]
    tied: dict[str, str]
    training: bool
    names: frozenset[str] | None = None

    @property
    def signature(self) -> Signature:
        return self.call.signature

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the FQNs of the PARAMETER placeholders in order, including unused and frozen parameters."""
        return tuple(self.shapes(InputRole.PARAMETER))

    def shapes(self, role: InputRole) -> dict[str, torch.Size]:
        """Return the shapes of parameters, buffers or inputs by name, in the order of the placeholders."""
        return {key.name: tensor.shape for key, tensor in self.call.tensors.items() if key.role is role}

    @property
    def graph_module(self) -> GraphModule:
        """Return the joint graph of forward and backward in ATen ops. Raises CaptureError if it cannot be traced as
        one graph.
        """
        return self._whole[0]

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Return the values of BUFFER placeholders that are not buffers of the module.

        They are plain tensor attributes, tensors of the surrounding code, and literals. A constant is on meta if the
        module's attribute is.
        """
        return self.call.constants | self._whole[1]

    def trace(self) -> GraphModule:
        """Trace `graph_module` now and return it."""
        return self.graph_module

    @cached_property
    def _whole(self) -> tuple[GraphModule, dict[str, torch.Tensor]]:
        return self.joint_of(self.call)

    def joint_of(self, call: FlatCall) -> tuple[GraphModule, dict[str, torch.Tensor]]:
        """Return the joint graph of `call` (this one, or one with fewer layers) and the literals that became BUFFERs.
        """
        with _tracing(training=self.training):
            joint = trace_joint(call.graph_module, tuple(call.tensors.values()), select_decompositions(whole=_WHOLE))
        return joint.graph_module, finish_graph(joint, call, self.modules)


@contextmanager
def _tracing(*, training: bool) -> Iterator[None]:
    """Set up torch for tracing, and raise torch's errors as CaptureErrors."""
    try:
        with torch.inference_mode(mode=False), torch.set_grad_enabled(training), lazy_code(), uncollected():
            yield
    except CaptureError:
        raise
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise capture_error(error) from error


def capture(module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, **how: Any) -> Captured:
    """Capture a call as `capture_call` does, and trace its joint graph now."""
    captured = capture_call(module, args, kwargs, **how)
    captured.trace()
    return captured


def capture_call(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    training: bool,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype | None = None,
    cast_inputs: bool = True,
) -> Captured:
    """Capture one call of `module` at the shapes of the arguments; neither is changed or run.

    With `training`, the graph is forward and backward if any output needs a gradient, otherwise the forward as under
    `torch.no_grad()`. Module and arguments may be real, fake or on meta; the graph is for `device`. It takes
    contiguous tensors, whatever the strides of the examples.

    With `compute_dtype`, floating-point parameters and (with `cast_inputs`) arguments have that dtype in the graph;
    `signature` has the dtypes that were given.

    Raises CaptureError for code that dynamo cannot trace; what cannot be differentiated is found when the joint graph
    is traced.
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
    with _tracing(training=training):
        traced = _trace(_Call(fake.module), *call.with_leaves(leaves), mode)
        flat = flatten_call(traced, fake, call, leaves, fake_of)
    modules = {id(child): fqn for fqn, child in fake.module.named_modules()}
    return Captured(flat, modules, fake.tied, training, traced.names)


def _trace(call: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> TracedModule:
    """Return the trace of a call that changes no Python object.

    Some modules set a flag on an object outside of them (a config, say) in their first call; the fake module has a
    copy of it. If a second call changes nothing more, these constants are set here as the first call would set them.
    """
    traced = _traced(call, args, kwargs, mode)
    for effect in traced.side_effects:
        if not effect.constants or isinstance(effect.changed, nn.Module):
            raise side_effect_error(effect)
    if not traced.side_effects:
        return traced
    before = [(vars(effect.changed), dict(vars(effect.changed))) for effect in traced.side_effects]
    for effect in traced.side_effects:
        for name, value in effect.constants.items():
            setattr(effect.changed, name, value)
    again = _traced(call, args, kwargs, mode)
    for effect in again.side_effects:
        for attributes, held in before:
            attributes.clear()
            attributes.update(held)
        raise side_effect_error(effect)
    return again


def _traced(call: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> TracedModule:
    """Return the trace of a call.

    A module that holds a lock while it sets itself up in its first call (hooks, say) is called once before, on tensors
    without data. Where `requires_grad_()` on a value stops the trace, it is left out.
    """
    marks_leaves, is_set_up = True, False
    while True:
        try:
            return trace_module(call, args, kwargs, marks_leaves=marks_leaves)
        except RuntimeError as error:
            if takes_lock(error) and not is_set_up:
                with rehearsed(mode):
                    call(*args, **kwargs)
                is_set_up = True
            elif marks_leaf(error) and marks_leaves:
                marks_leaves = False
            else:
                raise


class _Call(nn.Module):
    """Module that calls the traced module under a name that cannot clash with those of its children."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.autoshard_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Dynamo returns no graph if nothing is computed; the second result makes sure that something is.
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
                f"in tuples, lists, dicts or dataclasses, or register the class with torch.utils._pytree.register_pytree_node"
            )
    return call


def _brief(value: object) -> str:
    return format_leaf(value) if isinstance(value, torch.Tensor) or is_constant(value) else type(value).__name__
