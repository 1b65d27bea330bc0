"""Run a function on real gloo ranks, one process each, and give back what each returned.

The function and its arguments must be picklable (a module's own function); a rank that raises or hangs fails
the test with every rank's report. Importing torch, dynamo and Inductor takes a process seconds, so that ranks are forked
from one that has done nothing else; what must not depend on the order of sets is tested on `fresh` processes, which
share no seed of hashes.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Failure:
    """An error of a rank: the name of the exception's class, its message and its traceback."""

    kind: str
    message: str
    traceback: str


class RankError(AssertionError):
    """A rank raised, died or hung."""


IMPORTED = [  # before ranks are forked: 2 s of CPU less in each
    *("autoshard.api", "autoshard.debug.checking", "pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("passes._torch.dynamo.module_trace", "passes._torch.joint", "passes._torch.partition"),
    *("passes._torch.inductor.compilation", "tests.warm"),
]


def run_on_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 300.0, fresh: bool = False
) -> list[Any]:
    """Run `function(rank, *args)` on each of `ranks` gloo processes; return their results, in order of rank.

    Raises RankError with the tracebacks where a rank raised, and where one is not done after `timeout` seconds.
    """
    reports = reports_of_ranks(function, ranks, *args, timeout=timeout, fresh=fresh)
    failed = [f"rank {rank}: {report.traceback}" for rank, report in enumerate(reports) if isinstance(report, Failure)]
    if failed:
        raise RankError("\n".join(failed))
    return reports


def reports_of_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 300.0, fresh: bool = False
) -> list[Any]:
    """Run as `run_on_ranks` does, with a `Failure` in the place of the result of a rank that raised."""
    context = multiprocessing.get_context("spawn") if fresh else multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    port = _free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_rank_main, args=(rank, ranks, port, pipes[rank][1], function, args), daemon=True)
        for rank in range(ranks)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        return _collect(processes, [receiver for receiver, _ in pipes], timeout)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(processes: Sequence[BaseProcess], receivers: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    reports: dict[int, Any] = {}
    while len(reports) < len(receivers):
        waiting = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in reports}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} were not done after {timeout:.0f} s; others: {reports}")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting[receiver]
            try:
                reports[rank] = receiver.recv()
            except EOFError:
                processes[rank].join(timeout=5)
                code = processes[rank].exitcode
                reports[rank] = Failure("Exit", f"exit code {code}", f"died with exit code {code}")
    return [reports[rank] for rank in range(len(receivers))]


def _rank_main(
    rank: int, ranks: int, port: int, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks)
    )
    gc.set_threshold(50_000, 20, 20)  # as conftest does for the tests
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=150))
    dist.barrier()  # a rank that is done would close connections that another is still making
    try:
        report = function(rank, *args)
    except BaseException as error:
        report = Failure(type(error).__name__, str(error), traceback.format_exc())
    sender.send(report)
    sender.close()
    if dist.is_initialized():  # a script may have done it
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
