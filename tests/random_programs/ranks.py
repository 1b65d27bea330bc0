"""Train a program on real gloo ranks, and compare it with the model on one device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import Mesh, Options, autoshard
from autoshard.debug.simulated_ranks import distance, norm_of
from passes import errors
from tests.random_programs.program import Case, default_dtype
from tests.spawn import Failure, RankError, reports_of_ranks

STEPS, RATE = 2, 1e-3
TOLERANCE = {"float64": 1e-8, "float32": 1e-2}  # as a part of the largest gradient or parameter: checks look closer
SECONDS = 150.0  # of all ranks


def differences_on_ranks(case: Case, options: Options) -> list[str]:
    """Return what differs on any rank; the program gives a loss. Raises a rank's UserError, else RankError."""
    reports = reports_of_ranks(_train, Mesh(case.setting.mesh).size, case, options, timeout=SECONDS)
    for report in reports:
        if isinstance(report, Failure):
            kind = vars(errors).get(report.kind, RankError)  # a refusal stays one
            raise kind(report.message if issubclass(kind, errors.UserError) else report.traceback)
    return [f"rank {rank}: {line}" for rank, found in enumerate(reports) for line in found]


def _train(rank: int, case: Case, options: Options) -> list[str]:
    """Train two steps, and evaluate between them."""
    with default_dtype(case.program.dtype):
        (want, args), axes = case.program.make(), Mesh(case.setting.mesh)
        mesh = init_device_mesh("cpu", axes.sizes, mesh_dim_names=axes.names)
        got = autoshard(copy.deepcopy(want), mesh, args, options=options)
        found = _Differences(TOLERANCE[case.program.dtype])
        for step in range(STEPS):
            if case.setting.training:
                _step(got, want, args, found, f"step {step}")
            with torch.no_grad():
                found.compare(f"evaluation {step}", {"loss": got(*got.shard(*args))}, {"loss": want(*args)})
        return found.lines


def _step(got: Any, want: nn.Module, args: tuple[Any, ...], found: _Differences, name: str) -> None:
    mine, theirs = got(*got.shard(*args)), want(*args)
    found.compare(name, {"loss": mine}, {"loss": theirs})
    if not theirs.requires_grad:
        return
    for loss, model in ((mine, got), (theirs, want)):
        loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
        if model is got:
            ours = {key: _whole(gradient) for key, gradient in gradients.items()}
    found.compare(f"{name}, gradient", ours, gradients)
    for model in (got, want):
        if parameters := list(model.parameters()):  # an optimizer refuses none
            torch.optim.SGD(parameters, RATE).step()
        model.zero_grad()
    found.compare(f"{name}, parameter", {k: _whole(p) for k, p in got.named_parameters()}, dict(want.named_parameters()))
    found.compare(f"{name}, buffer", {key: _whole(b) for key, b in got.named_buffers()}, dict(want.named_buffers()))


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


class _Differences:
    """Lists what differs by more than a tolerance, relative to the largest of its kind."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance, self.lines = tolerance, list[str]()

    def compare(self, kind: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        if got.keys() != want.keys():
            self.lines.append(f"{kind}: only one side has {sorted(got.keys() ^ want.keys())}")
        largest = max([1e-3, *(norm_of(value.detach()) for value in want.values())])
        for name in got.keys() & want.keys():
            error = distance(got[name].detach(), want[name].detach()) / largest
            if error > self.tolerance:
                self.lines.append(f"{kind} {name} is off by {error:.1e}")
