"""Modes of torch that change what a call computes, as far as no public function tells."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction


def in_transform() -> bool:
    """Return whether a transform of `torch.func` is active: vmap, grad, jvp, or what is made of them."""
    return torch._C._functorch.maybe_current_level() is not None


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for a batch of tensors, as in vmap and in a backward of many gradients at once."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def in_forward_mode() -> bool:
    """Return whether forward-mode automatic differentiation is active."""
    return forward_ad._current_level >= 0


def in_backward() -> bool:
    """Return whether a backward is running, as when `torch.utils.checkpoint` computes a forward again."""
    return torch._C._current_graph_task_id() != -1


def reentrant_checkpoint() -> Any:
    """Return the node of the `torch.utils.checkpoint(..., use_reentrant=True)` that is computed again now, or None."""
    node = torch._C._current_autograd_node()
    return node if isinstance(node, CheckpointFunction._backward_cls) else None


def keeps_graph() -> bool:
    """Return whether the backward that runs now may be run again (`retain_graph=True`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def function_modes() -> tuple[Hashable, ...]:
    """Return the modes that are asked at each function of torch, which a trace writes into the graph.

    A mode stands for its class and the numbers and words that it holds. The default device is left out.
    """
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [mode for mode in stack if not isinstance(mode, DeviceContext)]
    return tuple((type(mode), *((name, held) for name, held in vars(mode).items() if _is_plain(held))) for mode in modes)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Let no mode see the ops of a trace, or change them: it is asked at each op that runs."""
    with _disable_current_modes():
        yield


@contextmanager
def without_fused_encoders() -> Iterator[None]:
    """Let torch's encoder layers and attention call the same functions in evaluation as in training, and not one fused kernel.

    A fused kernel is one op, whose dims no rule can shard.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Take off the hooks for tensors that autograd saves, which `torch.func.grad` refuses, and put them on again afterwards.

    Transforms that are active are left as they were before, too: a trace that fails inside of `torch.func.grad` leaves it active,
    and hooks forbidden.
    """
    functorch, autograd, hooks = torch._C._functorch, torch._C._autograd, []
    depth, forbidden = functorch.get_dynamic_layer_stack_depth(), autograd._saved_tensors_hooks_get_disabled_error_message()
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if forbidden is None:
            autograd._saved_tensors_hooks_enable()
        else:
            autograd._saved_tensors_hooks_disable(forbidden)
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute as a graph says: its casts are ops, and an op of the dtype that the trace chose is not to be cast again."""
    with torch._C._DisableAutocast():
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Run a graph without autocast and without the modes of `function_modes`: the graph has what they do."""
    with torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
        yield


def without_torch_function(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` on tensors of subclasses as on those of `torch.Tensor`."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
