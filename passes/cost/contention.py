"""How kernels and collectives that run beside each other slow each other down.

They share what both need: processors and memory bandwidth on a GPU, cores on a CPU. While a link is in use a kernel does
1 / (1 + kernels) of its work in a second, and while a kernel runs the collectives of all links do 1 / (1 + links) of theirs.
Times of a link are given, as the simulator keeps them, as if no kernel ran from the last one's end on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contention:
    """Parts of their time by which kernels and collectives take longer beside each other; neither where both are 0.

    `kernels * links` is below 1: it would be quicker to let one wait for the other.
    """

    kernels: float = 0.0
    links: float = 0.0

    def __bool__(self) -> bool:
        return self.kernels > 0 or self.links > 0

    def kernel_end(self, start: float, seconds: float, busy_until: float) -> float:
        """When a kernel of so many seconds ends that starts at `start`, with links in use until `busy_until`.

        Links in use at a kernel's start stay so until their queues are done; none issued behind it starts before it ends.
        """
        in_use = max(0.0, busy_until - start) * (1 + self.links)  # with the kernel beside them
        beside = min(in_use / (1 + self.kernels), seconds)  # of its work
        return start + seconds + beside * self.kernels

    def link_time(self, time: float, start: float, end: float) -> float:
        """When a link gets to where it would have been at `time`, were there not a kernel from `start` to `end`."""
        left = time - start  # of its work
        return time if left <= 0 else time + min(left, (end - start) / (1 + self.links)) * self.links
