"""Comparison of a captured graph with the module itself: outputs, gradients and new buffers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture.capture import Captured, capture
from passes._torch import flatten_pytree
from passes.ir.graph import InputRole, Output, OutputRole, input_of, outputs_of, placeholders


def run(
    captured: Captured, module: nn.Module, args: Any, kwargs: Any, tangents: Mapping[str, Tensor]
) -> dict[Output, Any]:
    """Return the results of the graph on the module's own tensors."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers()), **captured.constants}
    paths = [spec.path for spec in captured.signature.inputs]
    inputs = dict(zip(paths, captured.signature.flatten(args, kwargs), strict=True))
    values = {InputRole.INPUT: inputs, InputRole.TANGENT: tangents}
    flat = [values.get(input_of(node).role, state)[input_of(node).name].detach() for node in nodes_in(captured)]
    return dict(zip(outputs_of(captured.graph_module.graph), captured.graph_module(*flat), strict=True))


def check(module: nn.Module, *args: Any, training: bool = True, **kwargs: Any) -> Captured:
    """Capture `module` and compare outputs, gradients and new buffers with the module itself."""
    captured = capture(module, args, kwargs, training=training)
    compare(captured, module, args, kwargs, training=training)
    return captured


def compare(captured: Captured, module: nn.Module, args: Any, kwargs: Any, *, training: bool) -> None:
    eager = copy.deepcopy(module)
    with torch.set_grad_enabled(training):
        expected = eager(*args, **kwargs)
    leaves = {path or "output": leaf for path, leaf in flatten_pytree(expected)[0]}
    tensors = [leaves[path] for path in captured.signature.outputs]  # one that is returned twice is one output
    generator = torch.Generator().manual_seed(0)
    tangents = {
        path: torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        for path, tensor in zip(captured.signature.outputs, tensors, strict=True)
        if tensor.requires_grad
    }
    assert [input_of(node).name for node in nodes_in(captured, InputRole.TANGENT)] == list(tangents)
    results = run(captured, module, args, kwargs, tangents)
    outputs = [value for output, value in results.items() if output.role is OutputRole.OUTPUT]
    assert_same(captured.signature.unflatten(outputs), expected)
    for name, buffer in eager.named_buffers():
        new = results.get(Output(OutputRole.BUFFER, name), dict(module.named_buffers())[name])
        assert_same(new, buffer)
    if not tangents:
        assert not names_of(captured, OutputRole.GRADIENT)
        return
    torch.autograd.backward([tensor for tensor in tensors if tensor.requires_grad], list(tangents.values()))
    expected_gradients = {name: p.grad for name, p in eager.named_parameters() if p.requires_grad}
    gradients = {
        output.name: value
        for output, value in results.items()
        if output.role is OutputRole.GRADIENT and not output.name.startswith("input:")
    }
    assert list(gradients) == list(expected_gradients)
    for name, gradient in expected_gradients.items():
        assert_same(gradients[name], gradient)


def assert_same(actual: Any, expected: Any) -> None:
    """Check for equal structure, and equal leaves up to rounding in float64."""
    left, right = flatten_pytree(actual), flatten_pytree(expected)
    assert left[1] == right[1]
    for (path, value), (_, wanted) in zip(left[0], right[0], strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(
                value, wanted, atol=1e-12, rtol=1e-10, equal_nan=True, msg=functools.partial("{}: {}".format, path)
            )
        else:
            assert type(value) is type(wanted)
            assert value == wanted


def nodes_in(captured: Captured, role: InputRole | None = None) -> tuple[torch.fx.Node, ...]:
    return placeholders(captured.graph_module.graph, role)


def names_in(captured: Captured, role: InputRole) -> list[str]:
    return [input_of(node).name for node in nodes_in(captured, role)]


def names_of(captured: Captured, role: OutputRole) -> list[str]:
    return [output.name for output in outputs_of(captured.graph_module.graph) if output.role is role]
