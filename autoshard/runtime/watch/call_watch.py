"""Let all ranks agree on each call before its first collective, and say which rank is missing, has stopped, or calls
something else.

An agreement is one all-reduce of 16 bytes on the CPU: no device waits for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from autoshard.runtime.watch.beacon import Beacon, beacon_of
from autoshard.runtime.watch.call_traits import ADVICE
from autoshard.runtime.watch.connection_errors import has_timed_out, is_connection_error, peer_error
from autoshard.runtime.watch.failed_calls import partly_failed_error
from autoshard.runtime.watch.rank_status import Status
from passes._torch import during_timeout
from passes.errors import DistributedError

T = TypeVar("T")

INTERRUPTIBLE = timedelta(seconds=1)  # time after which a waiting rank looks whether it was interrupted


@dataclass(frozen=True)
class SharedCall:
    """A call that all ranks make together; `traits` are what must be equal on all of them, by name."""

    what: str  # "forward call 3"
    note: str = ""  # shown with it: "training, with gradients"
    traits: tuple[tuple[str, str], ...] = ()
    details: str = field(default="", repr=False, compare=False)  # shown where ranks disagree: "x: float32[8, 4]"
    is_of_model: bool = True  # False: no model makes it
    advice: str = "make the same calls in the same order, with the same options, on every rank"  # where ranks disagree

    def text(self, model: str) -> str:
        """Return "forward call 3 of Net (training, with gradients)"."""
        return f"{self.what}{f' of {model}' if self.is_of_model else ''}{f' ({self.note})' if self.note else ''}"

    def trait(self, name: str) -> str:
        return dict(self.traits).get(name, "not given")

    def traits_text(self, names: Sequence[str]) -> str:
        """Return "program 1 (x: float32[8, 4])"."""
        details = f" ({self.details})" if self.details else ""
        return ", ".join(f"{name} {self.trait(name)}" for name in names) + details


class Watch:
    """The agreements of one model on a mesh; all models of a mesh share one order of calls."""

    def __init__(self, model: str, ranks: Sequence[int], *, limit: float) -> None:
        self.limit = limit  # seconds that a rank may be late
        self._beacon: Beacon | None = None
        self._group: dist.ProcessGroup | None = None
        if len(ranks) > 1:
            self._beacon, self._group = beacon_of(ranks, limit)
            self._beacon.check_in_step(f"autoshard(...) of {model}", looks=True)
        self._ranks, self._model = ranks, model
        self._covered: list[dist.ProcessGroup] = []
        self._timeouts: ExitStack | None = None  # that the present call sets
        if self._beacon is not None:
            self._beacon.models[model] += 1
            number = self._beacon.models[model]
            self._model = model if number == 1 else f"{model} (model {number})"

    def cover(self, group: dist.ProcessGroup) -> None:
        """Let collectives of a group that are issued inside of calls, also of the present one, time out as an agreement does."""
        if not any(group is one for one in self._covered):
            self._covered.append(group)
            if self._timeouts is not None:
                self._timeouts.enter_context(during_timeout([group], self.limit))

    @contextmanager
    def call(self, call: SharedCall) -> Iterator[None]:
        """Agree with all ranks on the call that is made in the body.

        Raises DistributedError if ranks make different calls, if one does not come in time, or if one stops.
        """
        if self._beacon is None:
            yield
            return
        self._beacon.check_in_step(call.text(self._model))
        outer = self._beacon.begin(call.text(self._model), self.limit)
        try:
            self._agree(call)
            self._beacon.note("inside")
            with self._during_timeouts():
                yield
        except RuntimeError as error:
            if not is_connection_error(error):
                self._beacon.fail(error)
                raise
            told = self.stopped(error)
            self._beacon.fail(told)
            raise told from error
        except BaseException as error:
            self._beacon.fail(error)
            raise
        self._beacon.end(outer)

    @contextmanager
    def _during_timeouts(self) -> Iterator[None]:
        before = self._timeouts
        try:
            with ExitStack() as self._timeouts:
                self._timeouts.enter_context(during_timeout(self._covered, self.limit))
                yield
        finally:
            self._timeouts = before

    def working(self, stage: str, work: Callable[[], T]) -> T:
        """Return `work()`, for which the other ranks wait as long as it takes."""
        if self._beacon is None:
            return work()
        before = self._beacon.status.working
        self._beacon.note(self._beacon.status.phase, working=stage)
        try:
            return work()
        finally:
            self._beacon.note(self._beacon.status.phase, working=before)

    def stopped(self, error: RuntimeError) -> DistributedError:
        """Return an error that names the rank because of which a collective failed with `error`."""
        named = None if self._beacon is None else self._beacon.stopped(timed_out=has_timed_out(error))
        return named or peer_error(error)

    def _agree(self, call: SharedCall) -> None:
        assert self._group is not None and self._beacon is not None
        mine = _digest((self._model, call, self._beacon.failed is None))
        both = torch.tensor([mine, ~mine], dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MAX), timedelta(seconds=self.limit)
        _wait(self._group.allreduce([both], options), self._beacon)
        largest, smallest = both.tolist()
        if largest != ~smallest:
            self._raise_disagreement(call, self._beacon.failed)
        self._beacon.failed = None

    def _raise_disagreement(self, call: SharedCall, failed: Status | None) -> None:
        told: list[tuple[str, SharedCall, Status | None]] = [("", call, failed)] * len(self._ranks)
        dist.all_gather_object(told, (self._model, call, failed), group=self._group)
        failures = dict(zip(self._ranks, [failure for _, _, failure in told], strict=True))
        if 0 < list(failures.values()).count(None) < len(failures):
            raise partly_failed_error(failures)
        calls = [(model, made) for model, made, _ in told]
        other = next(place for place, one in enumerate(calls) if one != calls[0])
        (model, first), (other_model, second) = calls[0], calls[other]
        texts = first.text(model), second.text(other_model)
        advice = next((one.advice for one in (first, second) if one.advice != SharedCall.advice), SharedCall.advice)
        if texts[0] == texts[1]:
            names = [name for name in dict([*first.traits, *second.traits]) if first.trait(name) != second.trait(name)]
            texts = (f"{texts[0]} with {first.traits_text(names)}", f"{texts[1]} with {second.traits_text(names)}")
            advice = ADVICE.get(names[0], advice)
        raise DistributedError(
            f"ranks make different calls: rank {self._ranks[0]} makes {texts[0]}, rank {self._ranks[other]} makes "
            f"{texts[1]}; {advice}"
        )


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)


def _wait(work: dist.Work, beacon: Beacon) -> None:
    while True:
        try:
            work.wait(INTERRUPTIBLE)
            return
        except RuntimeError:
            if work.is_completed():
                raise
        beacon.check_peers()
