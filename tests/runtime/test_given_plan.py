"""A plan that is given is run, by all ranks: the first rank's is the one that counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import Options, Overlap, ShardingPlan, autoshard, plan
from autoshard.compile.compiled import Mode
from tests.models import build
from tests.spawn import Failure, reports_of_ranks, run_on_ranks

EAGER: Mode = "eager"


def made(mesh: str = "dp=2", **options: Any) -> ShardingPlan:
    case = build("mlp")
    return plan(case.model, mesh, case.args, options=Options(**({"recipe": "fsdp"} | options)))


def test_a_plan_brings_its_options(one_rank: DeviceMesh) -> None:
    case = build("mlp")
    given = made("dp=1", recipe="ddp", overlap=Overlap(bucket_bytes=0))
    model = autoshard(case.model, one_rank, case.args, plan=given)
    assert model.plan.settings.options == given.settings.options
    assert model.plan.recipes == ("ddp",)


def test_a_plan_for_training_serves_an_evaluation_first(one_rank: DeviceMesh) -> None:
    case = build("mlp")
    model = autoshard(case.model, one_rank, plan=made("dp=1"), options=Options(recipe="fsdp", compile="eager"))
    with torch.no_grad():
        before = model(*case.args)
    loss = model(*case.args)
    loss.backward()
    assert torch.equal(before, loss)
    assert [program.plan.settings.training for program in model.programs] == [False, True]


def _train(rank: int, folder: str, fault: str) -> Any:
    case = build("mlp")
    if fault == "model" and rank == 0:
        case.model.spare = torch.nn.Linear(3, 3)
    if fault == "first" and rank == 0:
        case.model.forward = lambda x, target: x.item()
    given: Any = Path(folder) / f"plan{rank}.json"  # only the first rank's is there
    if fault in ("object", "model", "first"):
        given = ShardingPlan.load(Path(folder) / "plan0.json")
    if fault == "none given":
        given = None
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options = Options(recipe="fsdp", compile="eager")
    model = autoshard(case.model, mesh, case.args, plan=given, options=options)
    loss = model(*model.shard(*case.args))
    loss.backward()
    return loss.item(), model.plan.to_json()


def ranks(folder: Path, fault: str) -> list[Any]:
    reports = reports_of_ranks(_train, 2, str(folder), fault, timeout=60.0)
    return [f"{r.kind}: {r.message}" if isinstance(r, Failure) else r for r in reports]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("how", ["path", "object", "none given"])
def test_all_ranks_run_the_first_ranks_plan(tmp_path: Path, how: str) -> None:
    made().save(tmp_path / "plan0.json")
    (first, plan0), (second, plan1) = ranks(tmp_path, how)
    assert first == second
    assert plan0 == plan1
    case = build("mlp")
    assert abs(case.model(*case.args).item() - first) < 1e-9


@pytest.mark.gloo
@pytest.mark.slow
def test_a_plan_that_the_first_rank_cannot_read_fails_all(tmp_path: Path) -> None:
    (tmp_path / "plan0.json").write_text("{")
    first, second = ranks(tmp_path, "path")
    assert first.startswith(f"PlanError: the plan {tmp_path}/plan0.json cannot be read: it is not JSON, or was cut off (")
    assert second == f"DistributedError: reading the plan failed on rank 0: {first}"


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["first", "model"])
def test_a_first_rank_that_cannot_plan_fails_all(tmp_path: Path, fault: str) -> None:
    made().save(tmp_path / "plan0.json")
    first, second = ranks(tmp_path, fault)
    assert not first.startswith("DistributedError")
    assert second == f"DistributedError: planning failed on rank 0: {first}"


@pytest.mark.gloo
@pytest.mark.slow
def test_a_plan_for_another_mesh_is_refused_by_all_ranks(tmp_path: Path) -> None:
    made("dp=4").save(tmp_path / "plan0.json")
    assert ranks(tmp_path, "path") == [
        "PlanError: the plan does not fit: the mesh is dp=2, the plan's dp=4. Make a plan for this mesh"
    ] * 2


def _train_again(rank: int, has_args: Any, evaluates: Any) -> tuple[list[float], Any]:
    """Return the losses of a plan that a first call made, and of the same plan given, and the recipe that was chosen."""
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    options, losses, given = Options(compile="eager", progress=False), list[float](), None
    for args in (None, (x,) if has_args else None):
        torch.manual_seed(0)
        model = autoshard(torch.nn.Linear(4, 4), mesh, args, plan=given, options=options)
        if evaluates and given is not None:
            with torch.no_grad():
                losses.append(model(model.shard(x)[0]).square().sum().item())
        loss = model(model.shard(x)[0]).square().sum()
        loss.backward()
        losses.append(loss.item())
        given = ShardingPlan.from_json(model.plan.to_json())
    return losses, given.recipes if given is not None and given.solution is None else None


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("has_args", "evaluates"), [(False, False), (True, False), (False, True)])
def test_a_plan_of_a_first_call_splits_inputs_as_its_caller_did_also_when_it_is_given(*, has_args: bool, evaluates: bool) -> None:
    """The axis is not named for data, so that the caller gives whole batches; the recipe alone would split them."""
    for losses, recipes in run_on_ranks(_train_again, 2, has_args, evaluates):
        assert recipes == ("ddp",) and losses == pytest.approx([losses[0]] * len(losses))


def test_what_is_sent_to_other_ranks_is_the_plan_file(one_rank: DeviceMesh) -> None:
    case = build("mlp")
    model = autoshard(case.model, one_rank, case.args, options=Options(recipe="fsdp", compile="eager"))
    assert json.loads(model.plan.to_json())["fingerprint"] == model.plan.fingerprint == made("dp=1").fingerprint
