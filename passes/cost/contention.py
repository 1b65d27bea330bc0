"""Slow down kernels and collectives that run at the same time.

They share resources: processors and memory bandwidth on a GPU, cores on a CPU. While a link is in use, a kernel does
1 / (1 + kernels) of its work per second; while a kernel runs, the collectives of all links do 1 / (1 + links) of theirs.
The simulator keeps the times of a link as if no kernel ran after the last one that was added; each kernel delays them.
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.hardware.hardware import Hardware


@dataclass(frozen=True)
class Contention:
    """The fraction of their time by which kernels and collectives are slowed down while they overlap; 0: not at all.

    `kernels * links` is below 1; otherwise it would be faster not to overlap them.
    """

    kernels: float = 0.0
    links: float = 0.0

    @staticmethod
    def of(hardware: Hardware) -> Contention:
        """Return the contention of kernels and collectives on these devices."""
        return Contention(hardware.contention, hardware.link_contention)

    def __bool__(self) -> bool:
        return self.kernels > 0 or self.links > 0

    @property
    def delay(self) -> float:
        """Return the seconds by which kernels end later beside a message that takes a second alone."""
        return self.kernels * (1 + self.links) / (1 + self.kernels)

    def kernel_end(self, start: float, seconds: float, busy_until: float) -> float:
        """Return when a kernel that takes `seconds` alone ends, if it starts at `start` and links are in use until
        `busy_until`.

        Links in use at a kernel's start stay in use until their queues are empty; no collective that is issued after
        the kernel starts before the kernel ends.
        """
        in_use = max(0.0, busy_until - start) * (1 + self.links)  # seconds, as the kernel slows the links down
        beside = min(in_use / (1 + self.kernels), seconds)  # seconds of the kernel's work that it does meanwhile
        return start + seconds + beside * self.kernels

    def link_time(self, time: float, start: float, end: float) -> float:
        """Return when a link finishes what it would finish at `time` if no kernel ran from `start` to `end`."""
        left = time - start  # seconds of its work
        return time if left <= 0 else time + min(left, (end - start) / (1 + self.links)) * self.links
