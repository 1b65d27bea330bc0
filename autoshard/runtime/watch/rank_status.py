"""Say what each rank last did, and which rank the others wait for in vain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from passes.ir.units import format_seconds

Phase = Literal["arriving", "inside", "returned", "failed", "left"]

NAMED = 4  # ranks that a message describes; of others it gives the number


@dataclass(frozen=True)
class Status:
    """The last act of a rank, as it tells the others."""

    number: int  # of calls begun, whatever the model
    call: str  # "forward call 3 of Net (training, with gradients)"
    phase: Phase
    cause: str = ""  # of "failed" and "left"
    secondary: bool = False  # it failed because another rank did
    lost: bool = False  # a collective failed because of another rank, and none can run after that
    during: bool = False  # it left before the call had returned
    working: str = ""  # work inside a call that others wait for, as in "planning"
    seconds: float = 0.0  # since the phase began, by the rank's own clock
    where: str = ""  # "train.py:45 in evaluate": the user's line that the rank is at
    beat: int = 0  # grows while the process lives

    @property
    def has_stopped(self) -> bool:
        """Return whether the rank gave up by itself."""
        return self.phase in ("failed", "left") and not self.secondary

    @property
    def progress(self) -> tuple[object, ...]:
        """Return what changes as the rank goes on."""
        return self.number, self.phase, self.working


def describe(status: Status | None, *, silent: bool = False) -> str:
    """Return "its last call, ..., returned 5.1 s ago; it is at train.py:45 in evaluate"; None: it has told nothing."""
    if status is None:
        return "it has not called autoshard(...)"
    place = f"{'in' if status.phase in ('arriving', 'inside') or status.during else 'after'} {status.call}"
    if status.phase == "left":
        return f"it ended {place}: {status.cause}"
    if status.phase == "failed":
        return f"it failed in {status.call}: {status.cause}"
    if silent:
        return f"its last report was {place}; since then it was killed or stopped, or it lost its network"
    at = f"; it is at {status.where}" if status.where else ""
    since = format_seconds(status.seconds)
    if status.phase == "returned":
        return f"its last call, {status.call}, returned {since} ago{at}"
    return f"it has been {status.working or 'in'}{' in' if status.working else ''} {status.call} for {since}{at}"


def describe_ranks(found: Mapping[int, str]) -> str:
    """Return "rank 1: ...; rank 2: ..." of the first few."""
    texts = [f"rank {rank}: {text}" for rank, text in list(found.items())[:NAMED]]
    return "; ".join([*texts, *([f"and {len(found) - NAMED} more"] if len(found) > NAMED else [])])


def ranks_text(ranks: Mapping[int, object]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    some = [str(rank) for rank in list(ranks)[:NAMED]] + (["..."] if len(ranks) > NAMED else [])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(some)}"


def stopped_ranks(
    mine: Status, peers: Mapping[int, Status | None], silent: frozenset[int], *, final: bool
) -> dict[int, str]:
    """Return the ranks that broke this rank's connections, with what they did: those that gave up by themselves before
    those that only were silent.

    Without `final`, a rank may yet tell more: a failure that followed from another's does not count.
    """
    stopped = {r: describe(s) for r, s in peers.items() if s is not None and s.has_stopped and _concerns(s, mine)}
    if stopped:
        return stopped
    quiet = {r: describe(s, silent=True) for r, s in peers.items() if s is not None and r in silent}
    if quiet or not final:
        return quiet
    if len(peers) == 1:
        return {rank: describe(status, silent=True) for rank, status in peers.items()}
    return {r: describe(s) for r, s in peers.items() if s is not None and s.phase in ("failed", "left")}


def _concerns(status: Status, mine: Status) -> bool:
    """Return whether a rank stopped before it had done its part of this rank's call."""
    return status.number < mine.number or (status.number == mine.number and (status.phase == "failed" or status.during))


def late_ranks(
    mine: Status, peers: Mapping[int, Status | None], silent: frozenset[int]
) -> dict[int, str]:
    """Return the ranks that this rank's call still waits for, with what they do: those that have not come to it, else
    those that are not alive, else all that are inside of it.
    """
    missing = {r: s for r, s in peers.items() if s is None or s.number < mine.number}
    inside = {r: s for r, s in peers.items() if s is not None and s.number == mine.number and s.phase != "returned"}
    quiet = {r: s for r, s in inside.items() if r in silent}
    stopped = {r: s for r, s in inside.items() if s.has_stopped}
    chosen: Mapping[int, Status | None] = missing or stopped or quiet or inside or peers
    return {rank: describe(status, silent=rank in silent) for rank, status in chosen.items()}
