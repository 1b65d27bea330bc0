"""A rank that is late, has stopped, or makes another call is named on all ranks, with what it last did."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import DistributedError, Options, ShardedModule, UserError, autoshard
from autoshard.runtime import build
from autoshard.runtime.execution import Execution
from autoshard.runtime.watch.connection_errors import is_connection_error
from autoshard.runtime.watch.rank_status import Status, describe, describe_ranks, late_ranks, ranks_text, stopped_ranks
from autoshard.runtime.watch.user_line import user_line
from tests.spawn import Failure, reports_of_ranks, run_on_ranks

TIMEOUT = 1.5  # seconds; the groups' own is 60
SECONDS = 10.0  # in which every rank has to end
OPTIONS = Options(recipe="fsdp", compile="eager", hardware=None, rank_timeout=TIMEOUT)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def sharded(mesh: DeviceMesh, options: Options = OPTIONS) -> tuple[ShardedModule, tuple[Any, ...]]:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model = autoshard(Net(), mesh, (x,), options=options)
    return model, model.shard(x)


def idle(seconds: float) -> None:
    threading.Event().wait(seconds)


def error_of(attempt: Callable[[], object]) -> str:
    """Return what `attempt` raises, in time, without the figures of seconds."""
    began = time.monotonic()
    try:
        attempt()
    except Exception as error:
        assert time.monotonic() - began < SECONDS
        return re.sub(r"[\d.]+ m?s\b", "# s", f"{type(error).__name__}: {error}")
    return "nothing"


ADVICE = "; make the same calls in the same order, with the same options, on every rank"


def _different_calls(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found = []
    model, parts = sharded(mesh)
    other, _ = sharded(mesh)
    model(*parts).sum().backward()

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(*parts)

    found.append(error_of(evaluate if rank else lambda: model(*parts)))
    model.train()
    model.up.weight.requires_grad_(rank == 0)
    found.append(error_of(lambda: model(*parts)))
    model.up.weight.requires_grad_()
    found.append(error_of(lambda: (other if rank else model)(*parts)))
    out = model(*parts)
    found.append(error_of(lambda: model(*parts) if rank else out.sum().backward()))
    model(*parts).sum().backward()
    norm = model.up.weight.norm()
    found.append(error_of(lambda: model(*parts) if rank else norm.item()))
    options = OPTIONS if rank else Options(recipe="ddp", compile="eager", hardware=None, rank_timeout=TIMEOUT)
    found.append(error_of(lambda: sharded(mesh, options)))
    return [re.sub(r" \(\w{4}\)", "", text) for text in found]


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_that_make_different_calls_all_say_which() -> None:
    first, second = run_on_ranks(_different_calls, 2)
    net = "of Net (training, with gradients)"
    begins = "DistributedError: ranks make different calls: rank 0 makes"
    assert first == [
        f"{begins} forward call 2 {net}, rank 1 makes forward call 2 of Net (evaluation, without gradients){ADVICE}",
        f"{begins} forward call 2 {net} with program 1, requires_grad of parameters 4 of 4 (training, global x: float32[8, 4]), "
        f"rank 1 makes forward call 2 {net} with program to be made, requires_grad of parameters 3 of 4 (x: float32[4, 4])"
        f"{ADVICE}",
        f"{begins} forward call 2 {net}, rank 1 makes forward call 1 of Net (model 2) (training, with gradients){ADVICE}",
        f"{begins} backward call 2 of Net, rank 1 makes forward call 3 {net}{ADVICE}",
        f"{begins} item() on a DTensor, rank 1 makes forward call 4 {net}; each rank holds a part of the number: read it on "
        "every rank, as by norm = norm.item(), and print or log it on one",
        f"{begins} autoshard(...) of Net (model 3) with recipe 'ddp', rank 1 makes autoshard(...) of Net (model 3) with recipe "
        f"'fsdp'{ADVICE}",
    ]
    assert first == second


def _without_digests(texts: Sequence[str]) -> list[str]:
    return [re.sub(r"\([0-9a-f]{4}\)", "()", text) for text in texts]


def _other_writes(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found = []
    for change in ("step", "load"):
        model, parts = sharded(mesh)
        with torch.no_grad():
            for parameter in model.parameters() if rank else ():
                parameter.mul_(1.0)  # before the first step, values are compared instead
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(*parts).sum().backward()
        optimizer.step()
        copied = copy.deepcopy(model)
        copied(*parts)
        loaded = {name: value.full_tensor() for name, value in model.state_dict().items()}
        if rank == 0:
            optimizer.step() if change == "step" else model.load_state_dict(loaded)
        found.append(error_of(lambda: model(*parts)))  # noqa: B023
        found.append(error_of(lambda: copy.deepcopy(model)(*parts)))  # noqa: B023
        found.append(error_of(lambda: copied(*parts)))  # noqa: B023
    return found


@pytest.mark.gloo
@pytest.mark.slow
def test_a_rank_that_alone_steps_or_loads_a_checkpoint_is_an_error() -> None:
    first, second = run_on_ranks(_other_writes, 2)

    def told(model: str, call: str, steps: str = "") -> str:
        made = f"makes forward call 2 of {model} (training, with gradients) with writes to parameters"
        return (
            f"DistributedError: ranks make different calls: rank 0 {made} 8{steps} ({call}), rank 1 {made} 4{steps} ({call}); "
            "step the optimizer, load a checkpoint and change parameters on every rank"
        )

    called, copied = "training, global x: float32[8, 4]", "x: float32[4, 4]"  # of the model, and of a copy of it
    steps = ", optimizer steps SGD dampening=0, lr=0.1, momentum=0, weight_decay=0 ()"  # as many as writes, so others
    of_first = [told("Net", called, steps), told("Net", copied), "nothing"]
    of_second = [told("Net (model 2)", called), told("Net (model 2)", copied), "nothing"]
    assert _without_digests(first) == [*of_first, *of_second]
    assert first == second


def _other_numbers(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found = []
    for rates in ((0.1, 0.1), (0.1 + 1e-9, 0.1), (0.1, 0.2)):
        model, parts = sharded(mesh)
        groups = [{"params": [one], "weight_decay": torch.tensor(0.01 * i)} for i, one in enumerate(model.parameters(), 1)]
        optimizer = torch.optim.AdamW(groups[::-1] if rank else groups, lr=rates[rank])
        model(*parts).sum().backward()
        optimizer.step()
        del optimizer
        copied = copy.deepcopy(model)
        found += [error_of(lambda: model(*parts)), error_of(lambda: copied(*parts))]  # noqa: B023
    return found


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_that_step_with_other_learning_rates_are_in_error() -> None:
    """Numbers are equal to six digits, and in any order of groups; the digest of all steps is no part of what is tested."""
    first, second = run_on_ranks(_other_numbers, 2)
    call = "makes forward call 2 of Net (model 3) (training, with gradients) with optimizer steps"
    described = "(training, global x: float32[8, 4])"

    def made(rate: float) -> str:
        decays = [f"betas=(0.9, 0.999), eps=1e-08, lr={rate}, weight_decay=0.0{i}" for i in (1, 2, 3)]
        return f"{call} AdamW {' and '.join(decays)} () {described}"

    told = (
        f"DistributedError: ranks make different calls: rank 0 {made(0.1)}, rank 1 {made(0.2)}; give optimizers the same numbers "
        "on every rank; a scheduler or a line search that follows a loss needs the loss of the whole batch"
    )
    assert _without_digests(first) == ["nothing"] * 4 + [told, "nothing"]
    assert first == second


def _line_search(rank: int) -> list[tuple[int, float, str]]:
    found = []
    for is_whole in (True, False):
        torch.manual_seed(0)
        target = torch.randn(8, 2).chunk(2)[rank]
        model, parts = sharded(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=20.0, max_iter=1, max_eval=50, line_search_fn="strong_wolfe")
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = (model(*parts) - target).square().mean()  # noqa: B023
            loss.backward()
            losses.append(loss.detach())  # noqa: B023
            if is_whole:  # noqa: B023
                dist.all_reduce(losses[-1].div_(2))  # noqa: B023
            return losses[-1]  # noqa: B023

        optimizer.step(closure)
        length = float(optimizer.state[next(model.parameters())]["t"])
        found.append((len(losses), length, error_of(lambda: model(*parts))))  # noqa: B023
    return found


@pytest.mark.gloo
@pytest.mark.slow
def test_a_line_search_that_follows_the_loss_of_a_part_is_an_error() -> None:
    """Ranks that evaluate as often as others may still have chosen another length, and move their own parameters by it."""
    (first, other), (second, another) = run_on_ranks(_line_search, 2)
    assert first == second == (3, first[1], "nothing")
    call = "makes forward call 4 of Net (model 2) (training, with gradients) with optimizer steps LBFGS history_size=100"
    settings = "lr=20, max_eval=50, max_iter=1, tolerance_change=1e-09, tolerance_grad=1e-07 ()"

    def made(length: float) -> str:
        return f"{call}, length of the last step={length:.6g}, {settings} (training, global x: float32[8, 4])"

    told = (
        f"DistributedError: ranks make different calls: rank 0 {made(other[1])}, rank 1 {made(another[1])}; give optimizers the "
        "same numbers on every rank; a scheduler or a line search that follows a loss needs the loss of the whole batch"
    )
    assert other[0] == another[0] == 3 and other[1] != another[1]
    assert _without_digests([other[2], another[2]]) == [told, told]


def _late(rank: int) -> list[str]:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))  # rank 2 is not in it, and nobody waits for it
    if rank == 2:
        return []
    model, parts = sharded(mesh)
    model(*parts).sum().backward()
    if rank == 1:
        idle(2 * TIMEOUT + 1)
    return [error_of(lambda: model(*parts))]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_rank_that_is_late_is_named_with_its_last_call_and_its_line() -> None:
    (first,), (second,), _ = run_on_ranks(_late, 3)
    waited = (
        "DistributedError: forward call 2 of Net (training, with gradients) on rank 0 waited # s for rank 1; rank 1: its last "
        "call, backward call 1 of Net, returned # s ago; it is at test_watch.py:# in idle; make the same calls in the same "
        "order on every rank, or set the seconds that a rank may be late with Options(rank_timeout=...)"
    )
    assert re.sub(r"py:\d+", "py:#", first) == waited
    assert second.startswith("DistributedError: rank 0 stopped while rank 1 was in forward call 2 of Net")


def _inside(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, parts = sharded(mesh)
    model(*parts).sum().backward()
    if rank == 1:
        Execution.forward = lambda *args: idle(2 * TIMEOUT + 1)  # type: ignore[assignment, method-assign]
    return error_of(lambda: model(*parts))


@pytest.mark.gloo
@pytest.mark.slow
def test_a_rank_that_hangs_inside_of_a_call_is_named() -> None:
    first, _ = run_on_ranks(_inside, 2)
    assert re.sub(r"py:\d+", "py:#", first) == (
        "DistributedError: forward call 2 of Net (training, with gradients) on rank 0 waited # s for rank 1; rank 1: it has been "
        "in forward call 2 of Net (training, with gradients) for # s; it is at test_watch.py:# in idle; make the same calls in "
        "the same order on every rank, or set the seconds that a rank may be late with Options(rank_timeout=...)"
    )


def _never(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    if rank == 1:
        idle(TIMEOUT + 1)
        return ""
    return error_of(lambda: sharded(mesh))


@pytest.mark.gloo
@pytest.mark.slow
def test_a_rank_that_never_calls_is_named() -> None:
    assert run_on_ranks(_never, 2)[0] == (
        "DistributedError: autoshard(...) on rank 0 waited # s for rank 1; rank 1: it has not called autoshard(...); make the "
        "same calls in the same order on every rank, or set the seconds that a rank may be late with Options(rank_timeout=...)"
    )


def fail(*args: object) -> None:
    raise RuntimeError("out of memory")


def _stops(rank: int, how: str) -> str:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    model = autoshard(Net(), mesh, (x,), options=OPTIONS)
    parts = model.shard(x)
    model(*parts).sum().backward()
    if rank == 1:
        idle(0.5)  # its last call is told by now
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "destroyed":
            dist.destroy_process_group()
            idle(3)
            return ""
        if how == "raised":
            Execution.forward = fail  # type: ignore[assignment, method-assign]
    return error_of(lambda: model(*parts))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "killed",
            "its last report was after backward call 1 of Net; since then it was killed or stopped, or it lost its network",
        ),
        ("destroyed", "it ended after backward call 1 of Net: it destroyed its process groups"),
        ("raised", "in forward call 2 of Net (training, with gradients): RuntimeError: out of memory"),
    ],
)
def test_a_rank_that_stops_is_named_on_all_others(how: str, told: str) -> None:
    reports = reports_of_ranks(_stops, 3, how)
    for rank in (0, 2):
        assert not isinstance(reports[rank], Failure)
        assert "rank 1" in reports[rank] and told in reports[rank], reports[rank]


# --- texts, without processes

STEP = Status(3, "forward call 2 of Net", "inside", seconds=2.0)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, "it has not called autoshard(...)"),
        (Status(2, "backward call 1 of Net", "returned", seconds=5.0, where="train.py:45 in evaluate"),
         "its last call, backward call 1 of Net, returned 5.00 s ago; it is at train.py:45 in evaluate"),
        (STEP, "it has been in forward call 2 of Net for 2.00 s"),
        (Status(3, "forward call 2 of Net", "inside", working="compiling", seconds=2.0),
         "it has been compiling in forward call 2 of Net for 2.00 s"),
        (Status(3, "forward call 2 of Net", "failed", cause="RuntimeError: out of memory"),
         "it failed in forward call 2 of Net: RuntimeError: out of memory"),
        (Status(3, "forward call 2 of Net", "left", cause="its process exited", during=True),
         "it ended in forward call 2 of Net: its process exited"),
    ],
)
def test_a_status_reads_as_a_sentence(status: Status | None, expected: str) -> None:
    assert describe(status) == expected


def test_a_failure_of_its_own_comes_before_those_that_follow_from_it() -> None:
    own = Status(3, "forward call 2 of Net", "failed", cause="RuntimeError: out of memory")
    follows = Status(3, "forward call 2 of Net", "failed", cause="DistributedError: rank 2 stopped", secondary=True)
    peers = {1: follows, 2: own, 3: STEP}
    assert list(stopped_ranks(STEP, peers, frozenset(), final=False)) == [2]
    assert list(stopped_ranks(STEP, {1: follows, 3: STEP}, frozenset(), final=False)) == []
    assert list(stopped_ranks(STEP, {1: follows, 3: STEP}, frozenset(), final=True)) == [1]
    assert list(stopped_ranks(STEP, {1: follows, 3: STEP}, frozenset({3}), final=True)) == [3]


def test_a_rank_that_ended_after_its_part_is_not_why_a_call_failed() -> None:
    done = Status(3, "forward call 2 of Net", "left", cause="its process exited")
    assert stopped_ranks(STEP, {1: done, 2: STEP}, frozenset(), final=False) == {}


def test_those_that_have_not_come_are_late_before_those_inside() -> None:
    before = Status(2, "backward call 1 of Net", "returned")
    assert list(late_ranks(STEP, {1: before, 2: STEP, 3: None}, frozenset())) == [1, 3]
    assert list(late_ranks(STEP, {1: STEP, 2: STEP}, frozenset({2}))) == [2]


def test_a_message_names_a_few_of_many_ranks() -> None:
    many = dict.fromkeys(range(1, 8), "it is late")
    assert ranks_text(many) == "ranks 1, 2, 3, 4, ..."
    assert describe_ranks(many).endswith("rank 4: it is late; and 3 more")


def test_the_line_of_a_thread_is_the_users() -> None:
    assert re.fullmatch(r"\w+\.py:\d+ in .+", user_line(threading.get_ident()))
    assert user_line(0) == ""


def test_a_distributed_error_is_no_bad_input_and_is_told_once() -> None:
    error = DistributedError("saving failed on rank 1: Broken pipe")
    assert isinstance(error, RuntimeError) and not isinstance(error, ValueError)  # nor is it caught with bad samples
    assert not is_connection_error(error) and is_connection_error(RuntimeError("Broken pipe"))


def _compile_slowly(rank: int) -> list[int]:
    seconds = 2.0
    group = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    module: Any = build
    compiles = module.compile_split

    def slow(*args: Any, **kwargs: Any) -> Any:
        if rank == 0:
            idle(2 * seconds)
        return compiles(*args, **kwargs)

    module.compile_split = slow
    model, args = sharded(mesh, Options(recipe="fsdp", compile="eager", hardware=None))
    model(*args).sum().backward()
    return list(model.up.weight.grad.shape)


def test_ranks_wait_as_long_as_one_compiles() -> None:
    assert run_on_ranks(_compile_slowly, 2) == [[6, 4], [6, 4]]


def test_a_timeout_is_more_than_nothing() -> None:
    with pytest.raises(UserError) as caught:
        Options(rank_timeout=0)
    assert str(caught.value) == (
        "Options(rank_timeout=0): give seconds, more than 0, or None for the timeout of the process groups"
    )
