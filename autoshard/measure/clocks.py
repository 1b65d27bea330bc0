"""Time calls on the slowest of all ranks, on the host's clock or on the CUDA device's."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

c10d = torch.ops._c10d_functional

KIB, MIB = 1 << 10, 1 << 20
SHORTEST = 1e-6  # s: the resolution of the clocks; a shorter time is taken as this


@dataclass(frozen=True)
class Effort:
    """The sizes to measure, and how often to measure each."""

    edges: tuple[int, ...]  # sizes of square matrix products
    copied: int  # bytes of the copy that measures memory bandwidth
    attended: int  # sequence length of the attention
    sent: tuple[int, ...]  # bytes of messages
    rounds: int  # the shortest one counts
    round: float  # s: minimum duration of a round, which repeats a short call


# Processes that share a core alternate in ticks of the scheduler, 4 to 10 ms: a round on CPU spans several ticks.
QUICK = Effort((32, 64, 128), 32 * MIB, 64, (4 * KIB, 1 * MIB), 3, 2e-3)
CPU = Effort((32, 64, 128, 256, 512, 1024), 256 * MIB, 2048, (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB), 7, 50e-3)
CUDA = Effort(
    (128, 256, 512, 1024, 2048, 4096, 8192), 1024 * MIB, 4096, (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB), 11, 2e-3
)


class Clock(abc.ABC):
    """A clock for calls that all ranks make together: the time of the slowest rank, in the shortest of several rounds.

    Other processes can only make a round longer, so the shortest counts. Each round is long enough to be measured.
    (One rank alone may be faster than its share of a core allows, so the slowest rank counts.)
    """

    def __init__(self, device: str, effort: Effort) -> None:
        self._device, self._effort = device, effort

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call."""
        call()
        once = max(self._together(call, 1), SHORTEST)
        return self.repeated(call, max(1, int(self._effort.round / once)))

    def repeated(
        self, call: Callable[[], object], repeats: int, *, beside: Callable[[], torch.Tensor] | None = None
    ) -> float:
        """Return the seconds per call when a round makes `repeats` calls; `beside` starts a collective that the round
        waits for.
        """
        return min(self._together(call, repeats, beside) for _ in range(self._effort.rounds)) / repeats

    def _together(self, call: Callable[[], object], repeats: int, beside: Callable[[], torch.Tensor] | None = None) -> float:
        if world_size() == 1:
            return self._round(call, repeats, beside)
        dist.barrier()
        seconds = torch.tensor([self._round(call, repeats, beside)], dtype=torch.float64, device=self._device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds.item())

    @abc.abstractmethod
    def _round(self, call: Callable[[], object], repeats: int, beside: Callable[[], torch.Tensor] | None) -> float:
        """Return the seconds of all calls of a round on this rank."""


def clock_of(device: str, effort: Effort) -> Clock:
    """Return the clock of "cpu" or "cuda"."""
    return _CudaClock(device, effort) if device == "cuda" else _CpuClock(device, effort)


class _CpuClock(Clock):
    """Clock that times rounds on the host."""

    def _round(self, call: Callable[[], object], repeats: int, beside: Callable[[], torch.Tensor] | None) -> float:
        began = time.perf_counter()
        sent = beside and beside()
        for _ in range(repeats):
            call()
        if sent is not None:
            c10d.wait_tensor(sent)
        return time.perf_counter() - began


class _CudaClock(Clock):
    """Clock that times rounds with events on the compute stream."""

    def _round(self, call: Callable[[], object], repeats: int, beside: Callable[[], torch.Tensor] | None) -> float:
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        began.record()
        sent = beside and beside()
        for _ in range(repeats):
            call()
        if sent is not None:
            c10d.wait_tensor(sent)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


def world_size() -> int:
    """Return the number of ranks; 1 without process groups."""
    return dist.get_world_size() if dist.is_initialized() else 1
