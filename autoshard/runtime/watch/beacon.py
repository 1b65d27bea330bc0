"""Tell the other ranks of a mesh what this rank does, and read what they do, over the store of the process group.

A thread writes this rank's `Status` ten times a second; nothing is sent in the path of a step. The others read it only
when they wait too long, or when a connection breaks.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing.util import Finalize

import torch.distributed as dist

from autoshard.runtime.watch.failed_calls import check_in_step, failed_status, lost_error, lost_ranks
from autoshard.runtime.watch.rank_status import (
    Phase,
    Status,
    describe,
    describe_ranks,
    late_ranks,
    ranks_text,
    stopped_ranks,
)
from autoshard.runtime.watch.status_board import HOLDER, StatusBoard
from autoshard.runtime.watch.user_line import user_line
from passes._torch import new_group
from passes.errors import DistributedError
from passes.ir.units import format_seconds

BEAT = 0.1  # seconds from one sign of life to the next
BEAT_PER_RANK = 5e-4  # seconds more per rank, so that the store is asked some 2,000 times a second by a mesh of any size
SILENT_BEATS = 10  # beats without a sign of life after which a process counts as stopped
IDLE = 1.0  # seconds in one phase after which the user's line is told as well
FIRST_WARNING = 30.0  # seconds of waiting before the first warning, or half of the timeout; each further one after twice as long
LOOK = 0.5  # seconds from one look at the others to the next, while this rank waits
LOOK_PER_RANK = 0.01  # seconds more per rank: all ranks read the status of all, some 200 bytes each


class Beacon:
    """The signs of life of the ranks of one mesh; all its models share it."""

    def __init__(self, ranks: tuple[int, ...], rank: int, generation: int) -> None:
        self.ranks, self.rank, self.generation = ranks, rank, generation
        self.world = dist.group.WORLD
        self.models: Counter[str] = Counter()  # that were distributed on the mesh, by class
        self._board = StatusBoard(ranks, rank, generation)
        self._now, self._began = Status(0, "", "returned"), time.monotonic()
        self.failed: Status | None = None  # how the last call failed on this rank; None after one that all ranks agreed on
        self._beat = BEAT + BEAT_PER_RANK * len(ranks)
        self._limit = 0.0  # seconds that the present phase may last; 0: no limit
        self._warned = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoshard-beacon", daemon=True)
        self._at_exit = Finalize(None, self._leave_at_exit, exitpriority=100)
        self._look = max(LOOK, LOOK_PER_RANK * len(ranks))

    @property
    def status(self) -> Status:
        """Return what this rank does now."""
        return replace(self._now, seconds=time.monotonic() - self._began)

    def begin(self, call: str, limit: float) -> Status:
        """Note that this rank has come to a call, to which others may be `limit` seconds late; return what it did before."""
        before, self._warned, self._limit = self._now, 0.0, limit
        self._note(Status(before.number + 1, call, "arriving"))
        return before

    def end(self, before: Status) -> None:
        """Note that the present call has returned, to an outer one if it was called inside of that."""
        is_outer = before.phase == "inside"
        self._note(replace(before, number=self._now.number) if is_outer else replace(self._now, phase="returned"))

    def note(self, phase: Phase, *, working: str = "") -> None:
        """Note how far the present call is."""
        self._note(replace(self._now, phase=phase, working=working))

    def fail(self, error: BaseException) -> None:
        """Note that the present call failed, and tell it at once."""
        self.failed = failed_status(self.status, error)
        self._note(self.failed)
        self._tell()

    def check_in_step(self, call: str, *, looks: bool = False) -> None:
        """Raise DistributedError if this rank may not go on to a call: see `failed_calls.check_in_step`.

        Without `looks`, the other ranks are read only after a failure.
        """
        if self._now.lost:
            raise lost_error(call, self.rank, {self.rank: self.status})
        if self.failed is not None or looks:
            check_in_step(call, self.rank, self.failed, self._board, self._beat)

    def check_peers(self) -> None:
        """Raise DistributedError if a rank that this one waits for has lost its connections, as the thread has seen."""
        if lost := lost_ranks(self._board.last_seen):
            raise lost_error(self._now.call, self.rank, lost)

    def _note(self, status: Status) -> None:
        self._began = time.monotonic()
        self._now = status

    def meet(self, limit: float) -> dist.ProcessGroup:
        """Wait until each rank of the mesh has called `autoshard`; return a group for agreements.

        Raises DistributedError with the ranks that have not come in `limit` seconds.
        """
        self.begin("autoshard(...)", limit)
        self._tell()
        self._thread.start()
        deadline, pause = time.monotonic() + limit, 0.001
        while absent := [rank for rank, status in self._board.read().items() if status is None]:
            if time.monotonic() > deadline:
                raise _late_error(self._now.call, self.rank, dict.fromkeys(absent, describe(None)), limit)
            time.sleep(pause)
            pause = min(2 * pause, self._beat)
        self.note("returned")
        return new_group(self.ranks, timeout=timedelta(seconds=limit), backend="gloo")

    def stopped(self, *, timed_out: bool) -> DistributedError | None:
        """Return an error that says which rank stopped, or came too late, if that can be told.

        Call it when a collective has failed; it takes a second or two. No call can run on the mesh after that.
        """
        mine = self.status
        found, late = _stopped_or_late(self._board, mine, self._beat, timed_out=timed_out)
        self._now = replace(self._now, lost=True)
        if found:
            return DistributedError(
                f"{ranks_text(found)} stopped while rank {self.rank} was in {mine.call}; {describe_ranks(found)}"
            )
        return _late_error(mine.call, self.rank, late, mine.seconds) if late else None

    def _tell(self) -> None:
        told = replace(self.status, beat=int(time.monotonic() / self._beat))
        if told.seconds > IDLE and told.phase in ("returned", "inside"):
            told = replace(told, where=user_line(threading.main_thread().ident or 0))
        self._board.write(told)

    # --- the thread

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(self._beat) and self._board.is_alive:
            if dist.group.WORLD is not self.world:
                self._leave("it destroyed its process groups")
                return
            self._tell()
            if self._is_waiting and time.monotonic() - max(looked, self._began) > self._look:
                looked = time.monotonic()
                self._warn(self._board.read())

    @property
    def _is_waiting(self) -> bool:
        return self._now.phase in ("arriving", "inside") and not self._now.working

    def _warn(self, peers: Mapping[int, Status | None]) -> None:
        """Warn of ranks that this call waits for; one of the waiting ranks does."""
        status = self.status
        after = self._warned * 2 or min(FIRST_WARNING, self._limit / 2)
        at_work = any(one is not None and one.working for one in peers.values())
        if at_work or not after <= status.seconds < 0.9 * self._limit:
            return
        self._warned = after
        late = late_ranks(status, peers, frozenset())
        have_come = all(one is not None and one.number >= status.number for one in peers.values())
        if late and self.rank == (self.ranks[0] if have_come else min({*self.ranks} - late.keys())):
            warnings.warn(_warning(status, self.rank, late, self._limit), stacklevel=1)

    def _leave_at_exit(self) -> None:
        """Tell that the process ends; if others wait, stay until they have read it: the store may end with this process."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=IDLE)
        error = getattr(sys, "last_value", None)
        self._leave("its process exited" if error is None else f"{type(error).__name__}: {error}")
        deadline = time.monotonic() + 3 * self._look
        while self._board.is_held_here and time.monotonic() < deadline and _any_waits(self._board.read()):
            time.sleep(self._beat)

    def _leave(self, cause: str) -> None:
        now = self._now
        if now.phase != "left":
            self._note(replace(now, phase="left", cause=now.cause or cause, during=now.phase != "returned"))
            self._tell()


def _stopped_or_late(
    board: StatusBoard, mine: Status, beat: float, *, timed_out: bool
) -> tuple[dict[int, str], dict[int, str]]:
    """Watch the other ranks for some beats; describe those that stopped or, after a timeout, those that are late."""
    alone = len(board.others) == 1 and not timed_out  # the other rank it is
    deadline = time.monotonic() + (2 if alone else SILENT_BEATS + 1) * beat
    beats: dict[int, int] = {}
    while True:
        final = time.monotonic() > deadline
        peers = board.read()
        silent = frozenset(r for r, s in peers.items() if final and s is not None and beats.get(r) == s.beat)
        beats = beats or {rank: status.beat for rank, status in peers.items() if status is not None}
        found = stopped_ranks(mine, peers, silent, final=final and not timed_out)
        if not board.is_alive:
            found = stopped_ranks(mine, peers, frozenset(), final=False) or _without_holder(peers)
            final = True
        if found:
            return found, {}
        if final:
            return {}, late_ranks(mine, peers, silent) if timed_out else {}
        time.sleep(beat / 4)


def _without_holder(peers: Mapping[int, Status | None]) -> dict[int, str]:
    """Describe the rank that held a store which is gone, if it is one of the peers."""
    holder = {HOLDER: "it has ended, and with it the store of the process group"}
    return holder if HOLDER in peers else {}


def _late_error(call: str, rank: int, late: Mapping[int, str], seconds: float) -> DistributedError:
    return DistributedError(
        f"{call} on rank {rank} waited {format_seconds(seconds)} for {ranks_text(late)}; {describe_ranks(late)}; {ONE_ORDER}, "
        "or set the seconds that a rank may be late with Options(rank_timeout=...)"
    )


def _any_waits(peers: Mapping[int, Status | None]) -> bool:
    return any(one is not None and one.phase in ("arriving", "inside") for one in peers.values())


def _warning(status: Status, rank: int, late: Mapping[int, str], limit: float) -> str:
    left = format_seconds(limit - status.seconds)
    return (
        f"{status.call} on rank {rank} has waited {format_seconds(status.seconds)} for {ranks_text(late)}; "
        f"{describe_ranks(late)}; it fails in {left}: see Options(rank_timeout=...)"
    )


ONE_ORDER = "make the same calls in the same order on every rank"


def beacon_of(ranks: Iterable[int], limit: float) -> tuple[Beacon, dist.ProcessGroup]:
    """Return the beacon of these ranks and its group; opened at the first call, by all of them together."""
    ranks = tuple(ranks)
    known = _OPEN.get(ranks)
    if known is None or known[0].world is not dist.group.WORLD:
        beacon = Beacon(ranks, dist.get_rank(), 0 if known is None else known[0].generation + 1)
        _OPEN[ranks] = known = beacon, beacon.meet(limit)
    return known


_OPEN: dict[tuple[int, ...], tuple[Beacon, dist.ProcessGroup]] = {}  # per mesh; one of a destroyed world is replaced
