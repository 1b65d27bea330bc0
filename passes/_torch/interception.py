"""Interception of torch's ops: each call is given to a function that runs or replaces it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

Calls = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]


class _Interception(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, call: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.call(func, args, kwargs or {})


@contextmanager
def intercepted(call: Calls, *, as_traced: bool = False) -> Iterator[None]:
    """Let `call` answer every op below autograd; ops that it calls itself are not intercepted.

    With `as_traced`, ops that tracing decomposes above autograd are decomposed in the same way: `dropout` becomes
    `native_dropout` on every device.
    """
    with ExitStack() as stack:
        if as_traced:
            stack.enter_context(enable_python_dispatcher())
        stack.enter_context(_Interception(call))
        yield
