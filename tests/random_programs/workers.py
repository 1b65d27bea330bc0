"""Evaluate cases in processes of their own, so that one that crashes or hangs is a case like others."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

import torch

from tests.random_programs.draw import draw
from tests.random_programs.evaluate import INTERNAL, SECONDS, TIMEOUT, Outcome, evaluate
from tests.random_programs.program import Case

PATIENCE = 5.0  # times its limit of CPU seconds that a case may take on the clock: it waits for processes or for a core
CASES = 200  # that one process evaluates: captures leave memory behind


class Worker:
    """A process that evaluates one case after another."""

    def __init__(self, *, compiled: bool = False) -> None:
        self.compiled = compiled  # the cases of seeds
        self.seed: int | None = None  # of the case that it evaluates
        self.count = 0  # of cases that the process was given
        self._start()

    def give(self, case: Case | int) -> None:
        """Let it evaluate a case, or draw that of a seed first."""
        if self.count == CASES:
            self.stop()
            self._start()
        self.seed = case if isinstance(case, int) else -1
        self.count, self.deadline = self.count + 1, time.monotonic() + PATIENCE * SECONDS
        self.connection.send(case)

    def take(self) -> tuple[Case | None, Outcome, float]:
        """Return the case, how it ended, and its CPU seconds; wait for that."""
        try:
            if self.connection.poll(max(0.0, self.deadline - time.monotonic())):
                self.seed, (case, outcome, seconds) = None, self.connection.recv()
                return case, outcome, seconds
            outcome = Outcome(TIMEOUT, "does not return to Python")
        except EOFError:
            self.process.join()
            outcome = Outcome(INTERNAL, f"the process ended with {self.process.exitcode}")
        self.stop()
        self._start()
        self.seed = None
        return None, outcome, 0.0

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.compiled))  # no daemon: it starts ranks
        self.process.start()
        theirs.close()
        self.count, self.deadline = 0, 0.0


def evaluate_seeds(
    seeds: Iterable[int], workers: int, *, compiled: bool = False
) -> Iterator[tuple[int, Case | None, Outcome, float]]:
    """Yield the outcomes of the cases of `seeds`, each when it is done."""
    todo, idle, busy = iter(seeds), [Worker(compiled=compiled) for _ in range(workers)], list[Worker]()
    try:
        while True:
            while idle and (seed := next(todo, None)) is not None:
                idle[-1].give(seed)
                busy.append(idle.pop())
            if not busy:
                return
            latest = max(0.0, min(one.deadline for one in busy) - time.monotonic())
            ready = multiprocessing.connection.wait([one.connection for one in busy], latest)
            for one in [one for one in busy if one.connection in ready or one.deadline <= time.monotonic()]:
                seed = one.seed
                assert seed is not None
                yield seed, *one.take()
                busy.remove(one)
                idle.append(one)
    finally:
        for one in (*idle, *busy):
            one.stop()


def _work(connection: Connection, compiled: bool) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        case = draw(given, compiled=compiled) if isinstance(given, int) else given
        started = time.process_time()
        outcome = evaluate(case)
        connection.send((case, outcome, time.process_time() - started))
