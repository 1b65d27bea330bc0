"""The traits of a forward, which are equal on all ranks, and what to do where one is not."""

from __future__ import annotations

import hashlib
from functools import lru_cache

_WRITES, _NUMBERS = "writes to parameters", "optimizer steps"
ADVICE = {
    _WRITES: "step the optimizer, load a checkpoint and change parameters on every rank",
    _NUMBERS: "give optimizers the same numbers on every rank; a scheduler or a line search that follows a loss needs the loss "
    "of the whole batch",
}


def forward_traits(
    program: str, *, training: tuple[bool, ...], trained: tuple[bool, ...], writes: int, numbers: str
) -> tuple[tuple[str, str], ...]:
    """Return names and values: the program, the flags of modules and parameters, how often parameters were changed in place, and
    the numbers that optimizers stepped with, such as learning rates.
    """
    return ("program", program), *_flags(training, trained), (_WRITES, str(writes)), (_NUMBERS, numbers)


@lru_cache
def _flags(training: tuple[bool, ...], trained: tuple[bool, ...]) -> tuple[tuple[str, str], ...]:
    flags = (("training of modules", training), ("requires_grad of parameters", trained))
    return tuple((name, _on(some)) for name, some in flags)


def _on(flags: tuple[bool, ...]) -> str:
    """Return "3 of 4 (4f2a)": how many are on, and a digest of which."""
    return f"{sum(flags)} of {len(flags)} ({hashlib.blake2b(bytes(flags), digest_size=2).hexdigest()})"
