"""When one rank fails, the others say so, soon; when ranks disagree, all say so."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

from autoshard import Options, autoshard
from autoshard.phases import default_passes
from autoshard.runtime.watch.connection_errors import peer_error
from passes.base import Pass, PassContext
from passes.ir.graph import Stage
from tests.models import build
from tests.spawn import Failure, reports_of_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

@dataclass(frozen=True)
class Shuffle(Pass):
    """Calls in a random order that keeps what they depend on; none for seed 0."""

    name: ClassVar[str] = "shuffle"
    takes: ClassVar[Stage] = Stage.LOCAL
    gives: ClassVar[Stage] = Stage.LOCAL

    seed: int = 0

    def run(self, gm: GraphModule, ctx: PassContext) -> bool:
        random, placed = Random(self.seed), set(gm.graph.find_nodes(op="placeholder"))
        waiting = [node for node in gm.graph.nodes if node.op == "call_function"]
        while self.seed and waiting:
            node = random.choice([node for node in waiting if placed.issuperset(node.all_input_nodes)])
            waiting.remove(node)
            placed.add(node)
            gm.graph.output_node().prepend(node)
        return bool(self.seed)


EXPECTED_SECONDS = 60.0  # far below the timeout of the groups: nobody waits for that


def _train(rank: int, fault: str) -> str:
    case = build("mlp")
    if fault == "model" and rank == 1:
        case.model.spare = torch.nn.Linear(3, 3)
    if fault == "weights":
        torch.manual_seed(rank)
        for parameter in case.model.parameters():
            torch.nn.init.normal_(parameter)
    args: tuple[Any, ...] = (1,) if fault == "arguments" and rank == 1 else case.args
    axis = "tp" if fault == "batch" else "dp"
    recipe = "megatron" if fault == "batch" else "fsdp"
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    options = Options(recipe=recipe, compile="eager")
    if fault == "order":
        options = replace(options, passes=(*default_passes(), Shuffle(rank)), overlap=False)
    model = autoshard(case.model, mesh, args, options=options)
    parts = model.shard(*case.args)
    if rank == 1 and fault == "batch":
        parts = (parts[0] + 1, parts[1])
    if rank == 1 and fault == "shape":
        parts = tuple(part[:5] for part in parts)
    for step in range(5):
        if rank == 1 and step == 3 and fault == "raise":
            raise ValueError("the data loader has no more batches")
        if rank == 1 and step == 3 and fault == "die":
            os._exit(3)
        model(*parts).backward()
    return "done"


def messages(fault: str) -> list[str]:
    reports = reports_of_ranks(_train, 2, fault, timeout=EXPECTED_SECONDS)
    return [f"{r.kind}: {r.message}" if isinstance(r, Failure) else r for r in reports]


def test_without_a_fault_all_is_well() -> None:
    assert messages("none") == ["done", "done"]


@pytest.mark.parametrize(
    ("fault", "other", "told"),
    [
        ("raise", "ValueError: the data loader", "it ended after backward call 3 of "),
        ("die", "Exit: exit code 3", "its last report was "),
    ],
)
def test_a_rank_that_stops_takes_the_others_with_it(fault: str, other: str, told: str) -> None:
    first, second = messages(fault)
    assert first.startswith("DistributedError: rank 1 stopped while rank 0 was in forward call 4 of ")
    assert f"; rank 1: {told}" in first
    assert second.startswith(other)


def test_a_failure_that_nobody_explains_points_to_the_other_ranks() -> None:
    assert str(peer_error(RuntimeError("Connection closed by peer"))) == (
        "another rank has stopped or does not answer; look for the first error in the other ranks' output. (Connection closed "
        "by peer)"
    )


def test_a_rank_that_cannot_capture_is_named() -> None:
    first, second = messages("arguments")
    assert first.startswith("DistributedError: planning failed on rank 1: ")
    assert not second.startswith("DistributedError")
    assert first.endswith(second)


def test_a_rank_with_a_wrong_batch_is_named() -> None:
    first, second = messages("shape")
    assert first == second == (
        "DistributedError: ranks make different calls: rank 0 (training, x: float64[16, 24], y: float64[16, 16]), rank 1 "
        "(training, x: float64[5, 24], y: float64[5, 16]); every rank makes the same call: with parts of the same size, as "
        "model.shard(...) gives, or without the last batch, and with the same dtypes, arguments and settings of the model"
    )


def test_other_models_on_other_ranks_are_found_before_they_hang() -> None:
    first, second = messages("model")
    assert second == (
        "DistributedError: rank 1 and rank 0 have different models or inputs: parameter 'spare.weight' is not in the "
        "plan; parameter 'spare.bias' is not in the plan; build the same model, with the same options and example "
        "inputs, on each"
    )
    assert first == f"DistributedError: planning failed on rank 1: {second}"


def test_another_order_of_collectives_on_a_rank_is_found_before_they_hang() -> None:
    expected = (
        "DistributedError: ranks have different programs: rank 0 is at collective 1 of the forward, all_gather_into_tensor "
        "over dp of f64[32, 24] (%all_gather_into_tensor), where rank 1 is at collective 1 of the forward, "
        "all_gather_into_tensor over dp of f64[32] (%all_gather_into_tensor_1); build the same model, with the same "
        "options and example inputs, on each"
    )
    assert messages("order") == [expected] * 2


def test_other_weights_on_other_ranks_are_found_though_each_keeps_a_part() -> None:
    assert (
        messages("weights")
        == [
            "InputError: parameter 'layers.0.weight' is replicated on axis 'dp', but ranks 0 and 1 gave different values; "
            "build the model with the same seed on every rank, or load the same state_dict"
        ]
        * 2
    )


def test_other_batches_in_a_tensor_parallel_group_are_found() -> None:
    assert (
        messages("batch")
        == [
            "InputError: input 'x' is replicated on axis 'tp', but ranks 0 and 1 gave different values; give ranks that "
            "differ only on this axis the same batch, as model.sampler(...) does"
        ]
        * 2
    )
