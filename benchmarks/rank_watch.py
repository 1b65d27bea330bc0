"""Measure what it costs that ranks agree on each call: `python -m benchmarks.rank_watch --ranks 2`.

It prints microseconds per agreement, of the 16-byte all-reduce in it, and of a sign of life to the store, which a thread
sends ten times a second; each is the median on rank 0.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from autoshard.runtime.watch.call_watch import SharedCall, Watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=2000)
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_rank, (given.ranks, given.calls, port), nprocs=given.ranks)


def _rank(rank: int, ranks: int, calls: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(minutes=2))
    watch, group = Watch("Net", range(ranks), limit=60.0), dist.group.WORLD
    assert group is not None
    both, store = torch.zeros(2, dtype=torch.int64), dist.distributed_c10d._get_default_store()

    def agree() -> None:
        with watch.call(SharedCall("forward call 1", "training, with gradients")):
            pass

    rows = {
        "agreement on a call": _median(agree, calls),
        "of that, the all-reduce": _median(lambda: group.allreduce([both]).wait(), calls),
        "sign of life, in the thread": _median(lambda: store.set(str(rank), "x" * 200), calls),
    }
    dist.barrier()
    if rank == 0:
        for name, seconds in rows.items():
            print(f"{name:30}{seconds * 1e6:8.0f} us")
    dist.destroy_process_group()


def _median(call: Callable[[], object], calls: int) -> float:
    dist.barrier()
    taken = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
