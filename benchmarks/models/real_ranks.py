"""Train and evaluate a model of the table on four gloo processes, and compare it with the model on one device.

Simulated ranks run the graph; here everything runs that a user's processes run: parameters cut from each rank's own model,
calls with this rank's part of the batch, collectives, gradients in DTensors, and an evaluation after the optimizer's
step. Both sides compute in float64; what a model itself casts to float32 rounds to about 1e-7. A model with ops that
torch has for float32 only, as its products of grouped matrices, computes in float32.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from autoshard import autoshard
from benchmarks.models.case import Case
from benchmarks.models.cases import CASES, quiet
from benchmarks.models.measure import MESH, RECIPES

LIMIT = 600.0  # seconds for a model; then a rank hangs
CLOSE = 1e-4  # of the largest value of a tensor; the sine of a float32 angle of 1000, as of time steps, is off by 6e-5
SMALL = 1e-3  # of the largest gradient: below it, a gradient may be rounding alone
RATE = 0.01
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Exit)\b")
PRELOADED = [
    "torch",
    "transformers",
    "autoshard.api",
    "passes._torch.dynamo.module_trace",
    "passes._torch.joint",
    "benchmarks.models.cases",
]


@dataclass(frozen=True)
class RealRow:
    """Holds what four processes computed with a model, beside one device."""

    model: str
    recipe: str
    outcome: str  # "equal", or what went wrong
    training: float = 0.0  # largest difference of loss and gradients, as a part of the largest value of a tensor
    evaluation: float = 0.0  # of the loss after a step of SGD
    seconds: float = 0.0  # of the first rank, from the model on

    @property
    def is_equal(self) -> bool:
        return self.outcome == "equal"


def trained(case: Case, recipe: str) -> RealRow:
    """Train and evaluate a model on processes of this machine, with random drops left out."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ranks = start_processes(
            _rank, (case.name, recipe, port, str(report)), MESH.size, join=False, start_method="forkserver"
        )
        assert ranks is not None
        try:
            ended = _joined(ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            return RealRow(case.name, recipe, _reason(str(error)))
        return RealRow(**json.loads(report.read_text())) if ended else RealRow(case.name, recipe, "not done in time")


def _reason(report: str) -> str:
    """Return the line of a process's report that names the exception."""
    lines = report.strip().splitlines()
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])


def _joined(ranks: Any) -> bool:
    """Wait for processes; end those that take too long."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if ranks.join(timeout=10):
            return True
    for process in ranks.processes:
        process.kill()
    return False


def _rank(rank: int, name: str, recipe: str, port: int, report: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    quiet()
    dist.init_process_group("gloo", rank=rank, world_size=MESH.size)
    row = _compared(next(case for case in CASES if case.name == name), recipe)
    if rank == 0:
        Path(report).write_text(json.dumps(asdict(row)))
    dist.barrier()
    dist.destroy_process_group()


def _compared(case: Case, recipe: str) -> RealRow:
    started = time.perf_counter()
    model, inputs = _in_float64(case)
    one = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", MESH.sizes, mesh_dim_names=MESH.names)
    sharded: Any = autoshard(model, mesh, kwargs=inputs, options=RECIPES[recipe])
    parts = sharded.shard(**inputs)
    expected, found = _step(one, inputs), _step(sharded, parts)
    floor = SMALL * max(float(value.abs().max()) for value in expected.values())
    training = max(_difference(found[name], value, floor) for name, value in expected.items())
    evaluation = _difference(_evaluated(sharded, parts), _evaluated(one, inputs), floor)
    worst = max(training, evaluation)
    outcome = "equal" if worst <= CLOSE else "differs"
    return RealRow(case.name, recipe, outcome, training, evaluation, time.perf_counter() - started)


def _in_float64(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and its arguments in float64, or in float32 where torch has an op of the model for that alone."""
    model = case.model()
    _without_drops(model)
    doubled = {name: _doubled(value) for name, value in case.first_call().items()}
    try:
        _loss(copy.deepcopy(model).double()(**doubled))
    except RuntimeError:
        return model, case.first_call()
    return model.double(), doubled


def _without_drops(model: nn.Module) -> None:
    """Set the probabilities of dropout to zero: one device draws other numbers."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _doubled(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _step(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Take a step of SGD; return the loss and the gradients."""
    loss = _loss(model(**inputs))
    loss.backward()
    found = {"the loss": loss.detach()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = _whole(parameter.grad).clone()
                parameter.sub_(parameter.grad, alpha=RATE)
    return found


def _evaluated(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    with torch.no_grad():
        return _loss(model.eval()(**inputs))


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    loss = output["loss"] if isinstance(output, Mapping) else output.loss
    assert isinstance(loss, Tensor)
    return loss


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _difference(found: Tensor, expected: Tensor, floor: float) -> float:
    return float((_whole(found) - expected).abs().max()) / max(float(expected.abs().max()), floor)
