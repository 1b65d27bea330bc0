"""Train a program as real ranks do, and compare it with the model on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import Mesh, Options, autoshard
from autoshard.debug.simulated_ranks import distance, norm_of
from passes import errors
from tests.random_programs.program import Case, default_dtype
from tests.spawn import Failure, RankError, reports_of_ranks

STEPS, RATE = 2, 1e-3
TOLERANCE = {"float64": 1e-8, "float32": 1e-2}  # as a part of the largest gradient or parameter: checks look closer
TOLERANCE_ALONE = {"bfloat16": 1e-2, "float32": 1e-3, "float64": 1e-8}  # of the first that a program names
SECONDS = 150.0  # of all ranks
Args = tuple[Any, ...]


def differences_on_ranks(case: Case, options: Options) -> list[str]:
    """Return what differs on any rank; the program gives a loss. Raises a rank's UserError, else RankError."""
    reports = reports_of_ranks(_train, Mesh(case.setting.mesh).size, case, options, timeout=SECONDS)
    for report in reports:
        if isinstance(report, Failure):
            kind = vars(errors).get(report.kind, RankError)  # a refusal stays one
            raise kind(report.message if issubclass(kind, errors.UserError) else report.traceback)
    return [f"rank {rank}: {line}" for rank, found in enumerate(reports) for line in found]


def differences_alone(case: Case, options: Options | None) -> list[str]:
    """Return what differs where a world of one rank, this process, compiles the program; without options, torch.compile does.

    A varied case takes a smaller batch, where the model can, and evaluates in evaluation mode, before the last step.
    """
    want, args = case.program.make()
    text = f"{case.program.source()} {case.program.dtype}"
    found = _Differences(next(tolerance for name, tolerance in TOLERANCE_ALONE.items() if name in text))
    torch._dynamo.reset()
    with _one_rank() as mesh:
        got = copy.deepcopy(want)
        if options is None:
            got.compile()
        else:
            got = autoshard(got, mesh, args, options=options)
        for step in range(STEPS):
            if case.setting.varied and step == STEPS - 1:
                if smaller := _smaller(want, args):
                    _step(got, want, smaller, found, "smaller batch")
                for model in (got, want):
                    model.eval()
                _evaluate(got, want, args, found, "evaluation mode")
                for model in (got, want):
                    model.train()
            if case.setting.training:
                _step(got, want, args, found, f"step {step}")
            else:
                _evaluate(got, want, args, found, f"evaluation {step}")
    return found.lines


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
            _evaluate(got, want, args, found, f"evaluation {step}")
        return found.lines


@contextmanager
def _one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # not in an __all__
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def _smaller(model: nn.Module, args: Args) -> Args | None:
    """Return a batch without its last row; None if the model does not take that."""
    rows = args[0].shape[0]
    made = tuple(
        arg.detach()[:-1].clone().requires_grad_(arg.requires_grad) if arg.dim() and arg.shape[0] == rows else arg
        for arg in args
    )
    try:
        with torch.no_grad():
            copy.deepcopy(model)(*made)
    except Exception:  # whatever torch refuses
        return None
    return made if rows > 1 else None


def _evaluate(got: Any, want: nn.Module, args: Args, found: _Differences, name: str) -> None:
    with torch.no_grad():
        found.compare(name, _named(got(*_part(got, args))), _named(want(*args)))


def _step(got: Any, want: nn.Module, args: Args, found: _Differences, name: str) -> None:
    part, is_whole = _part(got, args), dist.get_world_size() == 1
    mine, theirs = _named(got(*part)), _named(want(*args))
    found.compare(name, mine, theirs)
    if not any(value.requires_grad for value in theirs.values()):
        return
    gradients = []
    for model, inputs, outputs in ((got, part, mine), (want, args, theirs)):
        _loss(outputs).backward()
        made = {key: parameter.grad for key, parameter in model.named_parameters()}
        made |= {f"of input {at}": value.grad for at, value in enumerate(inputs) if is_whole and value.is_leaf}
        gradients.append({key: _whole(gradient) for key, gradient in made.items() if gradient is not None})
        for value in inputs:
            value.grad = None
    found.compare(f"{name}, gradient", *gradients)
    for model in (got, want):
        if parameters := list(model.parameters()):  # an optimizer refuses none
            torch.optim.SGD(parameters, RATE).step()
        model.zero_grad()
    found.compare(f"{name}, parameter", {k: _whole(p) for k, p in got.named_parameters()}, dict(want.named_parameters()))
    found.compare(f"{name}, buffer", {key: _whole(b) for key, b in got.named_buffers()}, dict(want.named_buffers()))


def _part(got: Any, args: Args) -> Args:
    """Return a rank's part of a batch; that of one rank is the batch, and may have gradients."""
    if dist.get_world_size() > 1:
        return tuple(got.shard(*args))
    return tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)


def _named(output: Any, name: str = "output") -> dict[str, Tensor]:
    """Return the tensors of an output by name."""
    if isinstance(output, Tensor):
        return {name: output}
    items = output.items() if isinstance(output, Mapping) else enumerate(output)
    return {key: value for at, one in items for key, value in _named(one, f"{name}.{at}").items()}


def _loss(outputs: Mapping[str, Tensor]) -> Tensor:
    """Return a sum of which each number of an output has its own share."""
    parts = [torch.view_as_real(one) if one.is_complex() else one for one in outputs.values() if one.requires_grad]
    return torch.stack([(one.flatten() * torch.linspace(0.5, 1.5, one.numel()).to(one.dtype)).sum() for one in parts]).sum()


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
