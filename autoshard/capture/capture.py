"""Capture an `nn.Module` and example arguments as one ATen graph of forward and backward, on fake tensors.

Dynamo traces the Python code, AOTAutograd differentiates and functionalizes, and Inductor's decompositions break up
ops that have no kernel of their own. The result is the flat graph that `passes.ir.graph` describes: every parameter,
buffer and tensor argument is a placeholder, used or not; every output, new buffer value and gradient is a result.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autoshard.capture.batch_outputs import batch_outputs
from autoshard.capture.capture_errors import capture_error, check_module
from autoshard.capture.empty_operands import without_empty_operands
from autoshard.capture.fake_module import fake_module, fake_tensor
from autoshard.capture.flat_call import FlatCall, flatten_call
from autoshard.capture.garbage import uncollected
from autoshard.capture.joint_graph import finish_graph
from autoshard.capture.resized_call import resized_call
from autoshard.capture.signature import Call, Signature, bind_call, check_leaves, format_leaf, is_constant
from autoshard.capture.tracing import trace
from passes._torch import (
    OutsideRead,
    fake_mode,
    lazy_code,
    quiet_fakes,
    select_decompositions,
    trace_joint,
    without_fused_encoders,
    without_saved_tensors_hooks,
)
from passes.errors import CaptureError
from passes.fold import Fold
from passes.ir.folded_layers import Repeats
from passes.ir.graph import InputRole

_log = logging.getLogger("autoshard.capture")

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
    are those that the traced code reads (None: not known), `outside` what it reads from outside of the model.
    `batch_outputs` says of outputs that have as many rows as the batch whether these are its rows, or as many by chance; None
    if that is not known of one that reads no input. `known` is the joint graph, or that of a few of many equal layers, if it
    need not be traced. `is_comparable` says that the call was not unlike all earlier ones, so that it is worth while to compare
    later ones. `few_layers` are joint graphs traced from a few of the layers that a pass says to be equal, with what it left out.
    """

    call: FlatCall
    modules: Mapping[int, str]
    tied: dict[str, str]
    training: bool
    names: frozenset[str] | None = None
    outside: tuple[OutsideRead, ...] = ()
    batch_outputs: Mapping[str, bool | None] = field(default_factory=dict)
    known: GraphModule | None = None
    is_comparable: bool = True
    few_layers: dict[Fold, tuple[GraphModule, Repeats]] = field(default_factory=dict, repr=False)

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
        return self.joint_of(self.call) if self.known is None else (self.known, {})

    @uncollected()
    def joint_of(self, call: FlatCall) -> tuple[GraphModule, dict[str, torch.Tensor]]:
        """Return the joint graph of `call` (this one, or one with fewer layers) and the literals that became BUFFERs.
        """
        with _tracing(training=self.training):
            gm, tensors = without_empty_operands(call.graph_module), tuple(call.tensors.values())
            joint = trace_joint(gm, tensors, select_decompositions(whole=_WHOLE))
        return joint.graph_module, finish_graph(joint, call, self.modules)


@contextmanager
def _tracing(*, training: bool) -> Iterator[None]:
    """Set up torch for tracing, and raise torch's errors as CaptureErrors; their pages of hints go to our log."""
    try:
        with (
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(training),
            without_fused_encoders(),
            without_saved_tensors_hooks(),
            lazy_code(),
            quiet_fakes(),
            uncollected(),
        ):
            yield
    except CaptureError:
        raise
    except (RuntimeError, TypeError, ValueError, AssertionError, ModuleNotFoundError) as error:
        _log.info("torch cannot trace the model", exc_info=error)
        raise capture_error(error) from None


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
    earlier: Iterable[Captured] = (),
) -> Captured:
    """Capture one call of `module` at the shapes of the arguments; neither is changed or run.

    With `training`, the graph is forward and backward if any output needs a gradient, otherwise the forward as under
    `torch.no_grad()`. Module and arguments may be real, fake or on meta; the graph is for `device`. It takes
    contiguous tensors, whatever the strides of the examples.

    With `compute_dtype`, floating-point parameters and (with `cast_inputs`) arguments have that dtype in the graph;
    `signature` has the dtypes that were given.

    `earlier` are captures of other calls of the module: where the code calls the same functions of torch as in one of
    them, on tensors of other sizes, it is run and not traced.

    Raises CaptureError for code that dynamo cannot trace; what cannot be differentiated is found when the joint graph
    is traced.
    """
    call = _bind(module, args, kwargs or {})
    mode, place = fake_mode(), torch.device(device)

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        return fake_tensor(tensor, mode, place)

    leaves = {
        path: fake_tensor(leaf, mode, place, compute_dtype if cast_inputs else None) if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in call.leaves.items()
    }
    with _tracing(training=training):
        alike = [one for one in earlier if one.training == training]
        is_compared = bool(alike) and all(one.is_comparable for one in alike)
        if is_compared:
            fake = fake_module(module, mode, place, compute_dtype)
            resized = resized_call([one.call for one in alike], fake, call, leaves, mode)
            if resized is not None:
                like = alike[resized.number]
                names = None if like.names is None else like.names | resized.names
                return Captured(resized.call, like.modules, fake.tied, training, names, like.outside, like.batch_outputs)
        fake = fake_module(module, mode, place, compute_dtype)
        traced = trace(fake.module, *call.with_leaves(leaves), mode)
        flat = flatten_call(traced, fake, call, leaves, fake_of)
        modules = {id(child): fqn for fqn, child in fake.module.named_modules()}
        made = batch_outputs(flat, fake, call, leaves, mode)
    read = traced.module.names, traced.module.outside
    return Captured(flat, modules, fake.tied, training, *read, made, is_comparable=not is_compared)


def _bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    check_module(module)
    signature = inspect.signature(module.forward)
    try:
        call = bind_call(signature, args, kwargs)
    except TypeError as error:
        given = ", ".join([*map(_brief, args), *(f"{key}={_brief(value)}" for key, value in kwargs.items())])
        raise CaptureError(f"{type(module).__name__}.forward{signature} cannot take ({given}): {error}") from error
    check_leaves(call)
    return call


def _brief(value: object) -> str:
    return format_leaf(value) if isinstance(value, torch.Tensor) or is_constant(value) else type(value).__name__
