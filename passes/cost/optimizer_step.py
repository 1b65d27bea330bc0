"""Price the optimizer's update of one parameter: one pass over gradient, parameter and state, bound by memory."""

from __future__ import annotations

from passes.cost.program import COMPUTE, OPTIMIZER, Buffer, Task
from passes.errors import UserError
from passes.hardware.hardware import Hardware

# Tensors of a parameter's size that an optimizer keeps for it: AdamW its two moments, SGD without momentum none.
OPTIMIZER_STATES: dict[str | None, int] = {"adamw": 2, "sgd": 0, None: 0}


def check_optimizer(optimizer: str | None) -> None:
    """Raise UserError for an unknown optimizer."""
    if optimizer not in OPTIMIZER_STATES:
        known = ", ".join(repr(name) for name in OPTIMIZER_STATES)
        raise UserError(f"unknown optimizer {optimizer!r}; its memory and time are known for {known}")


def copies_of(optimizer: str | None) -> int:
    """Return the tensors of a trained parameter's size that stay: the parameter, its gradient, the optimizer's state."""
    return 2 + OPTIMIZER_STATES[optimizer]


def passes_over(optimizer: str | None) -> int:
    """Return the tensors of a parameter's size that an update moves: it reads the gradient, and reads and writes the
    parameter and the state; 0 without an optimizer."""
    return 0 if optimizer is None else 1 + 2 * (1 + OPTIMIZER_STATES[optimizer])


def update_of(
    gradient: tuple[str, ...], parameter: str, fqn: str, nbytes: int, optimizer: str, hardware: Hardware
) -> tuple[Task, Buffer | None]:
    """Return the task that updates a parameter, and the buffer of the optimizer's state, if it keeps any.

    `gradient` and `parameter` ("" where it is not in the program) name buffers; `nbytes` are the gradient's.
    """
    name, states = f"optimizer.{fqn or gradient[0]}", OPTIMIZER_STATES[optimizer]
    state = Buffer(name, states * nbytes, OPTIMIZER, fqn) if states else None
    inputs = (*gradient, *([parameter] if parameter else ()), *([name] if states else ()))
    moved = nbytes * passes_over(optimizer)
    task = Task(
        name, OPTIMIZER, COMPUTE, moved / hardware.memory_bandwidth, inputs, nbytes=moved, fqn=fqn, backward=True
    )
    return task, state
