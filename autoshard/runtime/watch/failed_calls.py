"""Keep a rank from going on alone after a call that failed on it, and all ranks after one of them lost its connections.

A loop that skips a batch whose call raises goes on with the next one. That works if the call failed on all ranks; if not,
the others may wait for this rank inside the call that it gave up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from autoshard.runtime.watch.rank_status import Status, describe, describe_ranks, ranks_text
from autoshard.runtime.watch.status_board import StatusBoard
from passes.errors import DistributedError

GRACE_BEATS = 11  # beats that others have to leave a call which failed here; more if it ran longer than that here
ADVICE = "let an error that not all ranks raise end its process, or check the batch on all ranks before the call"


def failed_status(status: Status, error: BaseException) -> Status:
    """Return the status of a rank whose call failed; of an error that tells of other ranks, it tells the first clause."""
    secondary = isinstance(error, DistributedError)
    text = str(error).partition(";")[0] if secondary else str(error)
    return replace(status, phase="failed", working="", cause=f"{type(error).__name__}: {text}", secondary=secondary)


def check_in_step(call: str, rank: int, failed: Status | None, board: StatusBoard, beat: float) -> None:
    """Raise DistributedError if other ranks are still in the call that `failed` here, or if one has lost its connections.

    A rank on which the call fails too, or returns, may be later than this one by as long as the call ran here.
    """
    began = time.monotonic()
    grace = max(GRACE_BEATS * beat, 0.0 if failed is None else failed.seconds)
    while True:
        peers = board.read()
        if lost := lost_ranks(peers):
            raise lost_error(call, rank, lost)
        inside = {} if failed is None or failed.secondary else _ranks_inside(failed, peers)
        if not inside or not board.is_alive:
            return
        if any(one.working for one in inside.values()):
            began = time.monotonic()
        elif failed is not None and time.monotonic() - began > grace:
            raise DistributedError(
                f"{call} cannot run on rank {rank}: {failed.call} failed there with {failed.cause}, while it still runs on "
                f"{ranks_text(inside)}, so that the ranks are no longer in step; {ADVICE}"
            )
        time.sleep(beat / 4)


def _ranks_inside(failed: Status, peers: Mapping[int, Status | None]) -> dict[int, Status]:
    """Return the ranks that come to a call or are in it."""
    return {
        rank: status
        for rank, status in peers.items()
        if status is not None
        and (status.number < failed.number or (status.number == failed.number and status.phase in ("arriving", "inside")))
        and status.phase != "left"
    }


def lost_ranks(peers: Mapping[int, Status | None]) -> dict[int, Status]:
    """Return the ranks that have lost their connections."""
    return {rank: status for rank, status in peers.items() if status is not None and status.lost}


def lost_error(call: str, rank: int, lost: Mapping[int, Status]) -> DistributedError:
    """Return the error of a rank that cannot make a call, because ranks have lost their connections."""
    told = {other: describe(status) for other, status in lost.items()}
    return DistributedError(
        f"{call} cannot run on rank {rank}: {ranks_text(told)} lost the connection to other ranks; {describe_ranks(told)}; "
        "start all processes again"
    )


def partly_failed_error(failures: Mapping[int, Status | None]) -> DistributedError:
    """Return the error of ranks of which only some failed in the call before."""
    failed = {rank: describe(status) for rank, status in failures.items() if status is not None}
    others = {rank: status for rank, status in failures.items() if status is None}
    return DistributedError(
        f"the ranks are no longer in step: a call failed on {ranks_text(failed)} and not on {ranks_text(others)}; "
        f"{describe_ranks(failed)}; {ADVICE}"
    )
