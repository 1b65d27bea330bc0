"""Give each call of a sharded model random numbers of its own, equal on all ranks, and a repeated call those of the first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from passes._torch import in_backward

KEPT = 65_536  # calls whose random numbers a checkpoint can repeat: more than the microbatches of any step

_alike: dict[int, int] = {}  # state of torch's generator -> models that were sharded in it since the last call


def new_origin() -> tuple[int, int]:
    """Return what the random numbers of a new model start from: the state of torch's generator, which it leaves as it is, and
    the number of models before in the same state."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=7).digest()
    state = int.from_bytes(digest, "little")
    _alike[state] = _alike.get(state, -1) + 1
    return state, _alike[state]


@dataclass
class RandomStream:
    """The seeds of the calls of one model.

    A call whose seed is asked for in a backward is one that `torch.utils.checkpoint` makes again: it has restored the state of
    torch's generator, from which each call draws a number that identifies it.
    """

    origin: tuple[int, ...]  # equal on all ranks
    copies: int = 0
    calls: dict[int, int] = field(default_factory=dict)  # number that was drawn -> call

    def seed(self, call: int, device: torch.device) -> torch.Tensor:
        """Return the seed of a call, by its number."""
        _alike.clear()
        drawn = int(torch.randint(1 << 62, (), device="cpu"))
        if in_backward():
            call = self.calls.get(drawn, call)
        self.calls[drawn] = call
        if len(self.calls) > KEPT:
            del self.calls[next(iter(self.calls))]
        # Calls must not share random numbers, nor must runs with neighbouring seeds: spread them (golden ratio).
        value = 0
        for part in self.origin:
            value = (value + part) * 0x9E3779B97F4A7C15
        return torch.tensor((value + call) % (1 << 63), dtype=torch.int64, device=device)

    def of_copy(self) -> RandomStream:
        """Return the stream of a copy of the model, which draws other numbers."""
        self.copies += 1
        return RandomStream((*self.origin, self.copies))
