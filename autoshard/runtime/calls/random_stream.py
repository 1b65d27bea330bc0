"""Give each call of a sharded model random numbers of its own, equal on all ranks, and a repeated call those of the first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from passes._torch import in_backward

KEPT = 65_536  # calls whose random numbers a checkpoint can repeat: more than the microbatches of any step


def origin_of(module: nn.Module) -> int:
    """Return what the random numbers of a model start from: a digest of the state of torch's generator, and of its parameters,
    as models of an ensemble may be sharded in the same state."""
    found = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=7)
    for parameter in module.parameters():
        if not parameter.is_meta and not isinstance(parameter, DTensor):
            found.update(parameter.detach().reshape(-1)[:1].cpu().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest(), "little")


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
