"""A fault on one rank ends the call on every rank within 10 s, with the rank and the cause named."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import Options, ShardedModule, autoshard
from tests.spawn import Failure, reports_of_ranks, run_on_ranks

SECONDS = 10.0  # in which every rank has to end
TIMEOUT = 1.5  # seconds that a rank may be late; the groups' own is 60
OPTIONS = Options(recipe="fsdp", compile="eager", hardware=None, rank_timeout=TIMEOUT)
TENSOR_PARALLEL = Options(recipe="megatron", compile="eager", hardware=None, rank_timeout=TIMEOUT)
FAULTY = 1  # the rank


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Projected(Net):
    """Has random features, which a state_dict does not hold."""

    projection: torch.Tensor

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.register_buffer("projection", torch.randn(4, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.projection)


class Scaled(Net):
    """Holds a tensor that is no buffer."""

    def __init__(self, scale: int) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.scale = torch.full((4,), float(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


X = torch.arange(32.0).reshape(8, 4)

Found = dict[str, tuple[str, float]]  # fault -> the error and its seconds


def sharded(mesh: DeviceMesh, *, width: int = 6, seed: int = 0, options: Options = OPTIONS) -> ShardedModule:
    torch.manual_seed(seed)
    return autoshard(Net(width), mesh, (X,), options=options)


def error_of(attempt: Callable[[], object]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", time.monotonic() - began


def _faults(rank: int) -> Found:
    """Commit one fault after another on one rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    is_faulty = rank == FAULTY
    model, whole = sharded(mesh), sharded(mesh, options=TENSOR_PARALLEL)
    parts = model.shard(X)
    model(*parts).sum().backward()

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(*parts)

    out = model(*parts)
    return {
        "skip a call": error_of(lambda: out.sum().backward() if is_faulty else model(*parts)),
        "wrong mode": error_of(evaluate if is_faulty else lambda: model(*parts)),
        "other batch size": error_of(lambda: model.train()(*([parts[0][:1]] if is_faulty else parts))),
        "other batch": error_of(lambda: whole(X + is_faulty)),
        "other model": error_of(lambda: sharded(mesh, width=8 if is_faulty else 6)),
        "other seed": error_of(lambda: sharded(mesh, seed=rank)(*parts)),
        **_other_values(mesh, rank),
    }


def _other_values(mesh: DeviceMesh, rank: int) -> Found:
    """Make the first call of models whose parameters are equal, but not all else that they hold."""
    model = Projected(rank)
    model.load_state_dict(Projected(0).state_dict())
    loaded = autoshard(Net(), mesh, (X,), options=replace(OPTIONS, recipe="ddp"))
    torch.manual_seed(rank)
    loaded.load_state_dict(Net().state_dict())
    projected = autoshard(model, mesh, (X,), options=OPTIONS)
    scaled = autoshard(Scaled(rank), mesh, (X,), options=OPTIONS)
    calls = {"other buffer": projected, "other attribute": scaled, "loaded otherwise": loaded}
    return {name: error_of(partial(one, *one.shard(X))) for name, one in calls.items()}


def _ends(rank: int, how: str) -> Found:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = sharded(mesh)
    parts = model.shard(X)
    model(*parts).sum().backward()
    if rank == FAULTY and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == FAULTY and how == "raise":
        sys.last_value = ValueError("no more batches")  # what the interpreter does where nobody catches an error
        atexit._run_exitfuncs()
        os._exit(1)
    return {how: error_of(lambda: model(*parts))}


CAUSES = {
    "skip a call": r"rank 0 makes forward call 3 of Net \(training, with gradients\), rank 1 makes backward call 2 of Net;",
    "wrong mode": r"rank 1 makes forward call 3 of Net \(evaluation, without gradients\);",
    "other batch size": r"rank 1 makes forward call 3 of Net .* \(x: float32\[1, 4\]\);",
    "other batch": "input 'x' is replicated on axis 'dp', but ranks 0 and 1 gave different values;",
    "other model": r"rank 1 and rank 0 have different models or inputs: parameter 'up.weight' is float32\[8, 4\], the plan's",
    "other seed": r"parameter 'up.weight' .* ranks 0 and 1 gave different values; build the model with the same seed",
    "other buffer": "buffer 'projection' is replicated on axis 'dp', but ranks 0 and 1 gave different values;",
    "other attribute": "attribute 'scale' is replicated on axis 'dp', but ranks 0 and 1 gave different values;",
    "loaded otherwise": "parameter 'up.weight' is replicated on axis 'dp', but ranks 0 and 1 gave different values;",
}
ENDS = {
    "kill": "since then it was killed or stopped, or it lost its network",
    "raise": "rank 1: it ended after backward call 1 of Net: ValueError: no more batches",
}


@pytest.mark.gloo
@pytest.mark.slow
def test_a_fault_on_one_rank_is_named_on_all_within_seconds() -> None:
    for found in run_on_ranks(_faults, 2):
        assert found.keys() == CAUSES.keys()
        for fault, cause in CAUSES.items():
            error, seconds = found[fault]
            assert re.search(cause, error) and seconds < SECONDS, f"{fault}, after {seconds:.2f} s: {error}"


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_is_named_on_the_others_within_seconds(how: str) -> None:
    other, ended = reports_of_ranks(_ends, 2, how)
    assert isinstance(ended, Failure)
    error, seconds = other[how]
    assert "rank 1 stopped while rank 0 was in forward call 2 of Net" in error
    assert ENDS[how] in error and seconds < SECONDS, f"{how}, after {seconds:.2f} s: {error}"
