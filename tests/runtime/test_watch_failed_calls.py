"""A rank on which a call failed does not go on without the others, and they name it though it did not end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from autoshard import DistributedError
from autoshard.runtime.execution import Execution
from autoshard.runtime.watch.call_watch import SharedCall, Watch
from autoshard.runtime.watch.connection_errors import is_connection_error
from autoshard.runtime.watch.failed_calls import check_in_step, lost_error, partly_failed_error
from autoshard.runtime.watch.rank_status import Status
from passes._torch import group_timeout, new_group
from tests.runtime.test_watch import TIMEOUT, error_of, idle, sharded
from tests.spawn import run_on_ranks

ADVICE = "let an error that not all ranks raise end its process, or check the batch on all ranks before the call"
INDEX_ERROR = "IndexError: index out of range; no row 99"


def _no_index(*args: object) -> None:
    raise IndexError("index out of range; no row 99")


def _goes_on(rank: int) -> list[str]:
    """Skip batches whose step raises: on both ranks, in the backward of rank 1, in the forward of rank 1."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    model, parts = sharded(mesh)
    forward, backward = Execution.forward, Execution._backward
    found = []

    def step() -> None:
        model(*parts).sum().backward()

    def backward_and_fail(*args: Any) -> None:
        backward(*args)
        _no_index()

    Execution.forward = _no_index  # type: ignore[assignment, method-assign]
    found.append(error_of(step))
    Execution.forward = forward  # type: ignore[method-assign]
    found.append(error_of(step))
    if rank == 1:
        Execution._backward = backward_and_fail  # type: ignore[assignment, method-assign]
    found += [error_of(step), error_of(step)]
    Execution._backward = backward  # type: ignore[method-assign]
    found.append(error_of(step))
    if rank == 1:
        Execution.forward = _no_index  # type: ignore[assignment, method-assign]
    found += [error_of(step), error_of(step)]
    idle(2 * TIMEOUT)  # the other rank has waited long enough
    return [*found, error_of(step), error_of(lambda: sharded(mesh))]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_rank_does_not_go_on_after_a_call_that_failed_on_it_alone() -> None:
    first, second = run_on_ranks(_goes_on, 2)
    net = "of Net (training, with gradients)"
    parted = (
        "DistributedError: the ranks are no longer in step: a call failed on rank 1 and not on rank 0; rank 1: it failed in "
        f"backward call 3 of Net: {INDEX_ERROR}; {ADVICE}"
    )
    stopped = (
        f"DistributedError: rank 1 stopped while rank 0 was in forward call 5 {net}; rank 1: it failed in forward call 5 {net}: "
        f"{INDEX_ERROR}"
    )
    lost = (
        f"rank 0 lost the connection to other ranks; rank 0: it failed in forward call 5 {net}: DistributedError: rank 1 stopped "
        f"while rank 0 was in forward call 5 {net}; start all processes again"
    )
    assert first[:6] == [INDEX_ERROR, "nothing", "nothing", parted, "nothing", stopped]
    assert second[:6] == [INDEX_ERROR, "nothing", INDEX_ERROR, parted, "nothing", INDEX_ERROR]
    assert first[6:] == [
        f"DistributedError: forward call 6 {net} cannot run on rank 0: {lost}",
        f"DistributedError: forward call 6 {net} cannot run on rank 0: {lost}",
        f"DistributedError: autoshard(...) of Net cannot run on rank 0: {lost}",
    ]
    assert second[6:] == [
        f"DistributedError: forward call 6 {net} cannot run on rank 1: forward call 5 {net} failed there with {INDEX_ERROR}, "
        f"while it still runs on rank 0, so that the ranks are no longer in step; {ADVICE}",
        f"DistributedError: forward call 6 {net} cannot run on rank 1: {lost}",
        f"DistributedError: autoshard(...) of Net cannot run on rank 1: {lost}",
    ]


def _loses_connection(rank: int) -> tuple[str, list[float]]:
    watch, group = Watch("Net", (0, 1), limit=60.0), new_group((0, 1), timeout=timedelta(seconds=90), backend="gloo")
    timeouts = []

    def work() -> None:
        with watch.call(SharedCall("work 1")):
            watch.cover(group)
            timeouts.append(group_timeout(group).total_seconds())
            if rank == 0:
                raise RuntimeError("Application timeout caused pair closure")

    def more_work() -> None:
        with watch.call(SharedCall("work 2")):
            pass

    told = error_of(work)
    timeouts.append(group_timeout(group).total_seconds())
    if rank == 0:
        idle(2.5)
        return told, timeouts
    return error_of(more_work), timeouts


@pytest.mark.gloo
@pytest.mark.slow
def test_a_rank_does_not_wait_for_one_without_connections_and_new_groups_time_out_as_others() -> None:
    (first, timeouts), (second, _) = run_on_ranks(_loses_connection, 2)
    assert timeouts == [60.0, 90.0]
    assert first == (
        "DistributedError: rank 1 stopped while rank 0 was in work 1 of Net; rank 1: its last report was in work 2 of Net; since "
        "then it was killed or stopped, or it lost its network"
    )
    assert second == (
        "DistributedError: work 2 of Net cannot run on rank 1: rank 0 lost the connection to other ranks; rank 0: it failed in "
        "work 1 of Net: DistributedError: rank 1 stopped while rank 0 was in work 1 of Net; start all processes again"
    )


# --- without processes

FAILED = Status(3, "forward call 2 of Net", "failed", cause="IndexError: no row 99")
INSIDE = Status(3, "forward call 2 of Net", "inside")


class Board:
    """Statuses of other ranks, as they are at each look; the last ones stay."""

    is_alive = True

    def __init__(self, *looks: Mapping[int, Status | None]) -> None:
        self.looks = list(looks)

    def read(self) -> Mapping[int, Status | None]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def going_on(*looks: Mapping[int, Status | None], failed: Status | None = FAILED) -> str:
    board: Any = Board(*looks)
    return error_of(lambda: check_in_step("forward call 3 of Net", 2, failed, board, 0.001))


def test_a_rank_waits_a_moment_until_others_have_left_the_call_that_failed_on_it() -> None:
    before = Status(2, "backward call 1 of Net", "returned")
    for left in (FAILED, replace(INSIDE, phase="returned"), replace(INSIDE, number=4)):
        assert going_on({0: before, 1: INSIDE}, {0: INSIDE, 1: INSIDE}, {0: left, 1: left}) == "nothing"
    assert going_on({0: INSIDE, 1: before}).endswith(f"runs on ranks 0, 1, so that the ranks are no longer in step; {ADVICE}")


def test_a_rank_waits_for_work_in_a_call_and_as_long_as_the_call_ran_on_it() -> None:
    work = [{0: replace(INSIDE, working="compiling")}] * 80  # looks; the grace is some 44
    assert going_on(*work, {0: FAILED}) == "nothing"
    assert going_on(*[{0: INSIDE}] * 80, {0: FAILED}, failed=replace(FAILED, seconds=0.5)) == "nothing"
    assert going_on(*[{0: INSIDE}] * 80, {0: FAILED}).startswith("DistributedError: forward call 3 of Net cannot run on rank 2")


def test_a_rank_that_failed_because_of_others_waits_for_nobody() -> None:
    assert going_on({0: INSIDE}, failed=replace(FAILED, secondary=True)) == "nothing"
    assert going_on({0: INSIDE}, failed=None) == "nothing"


def test_ranks_without_connections_are_named_with_the_first_clause_of_their_error() -> None:
    lost = replace(FAILED, cause="DistributedError: rank 2 stopped while rank 0 was in it", secondary=True, lost=True)
    assert str(lost_error("forward call 3 of Net", 2, {0: lost, 1: lost})) == (
        "forward call 3 of Net cannot run on rank 2: ranks 0, 1 lost the connection to other ranks; rank 0: it failed in forward "
        "call 2 of Net: DistributedError: rank 2 stopped while rank 0 was in it; rank 1: it failed in forward call 2 of Net: "
        "DistributedError: rank 2 stopped while rank 0 was in it; start all processes again"
    )


def test_a_call_that_failed_on_some_ranks_names_them() -> None:
    assert str(partly_failed_error({0: None, 1: FAILED, 2: FAILED, 3: None})) == (
        "the ranks are no longer in step: a call failed on ranks 1, 2 and not on ranks 0, 3; rank 1: it failed in forward call 2 "
        f"of Net: IndexError: no row 99; rank 2: it failed in forward call 2 of Net: IndexError: no row 99; {ADVICE}"
    )


def test_a_pair_that_a_timeout_closed_is_a_connection_that_broke() -> None:
    assert is_connection_error(RuntimeError("Application timeout caused pair closure"))
    assert not is_connection_error(DistributedError("Application timeout caused pair closure"))
