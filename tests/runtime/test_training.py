"""Training on real ranks with what users bring: optimizers, clipping, checkpoints, and Inductor's cache."""

from __future__ import annotations

import logging
import os
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from autoshard import Options, autoshard
from tests.models import Case, build
from tests.spawn import run_on_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

FSDP_MEGATRON = {"dp": "fsdp", "tp": "megatron"}


def sharded(
    shape: dict[str, int], recipes: dict[str, str], *, name: str = "mlp", mode: Any = "eager", now: bool = True
) -> tuple[Case, Any]:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    case = build(name)
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    args = case.args if now else None
    return case, autoshard(case.model, mesh, args, options=Options(recipe=recipes, compile=mode))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for n, p in model.named_parameters()}


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def _train(rank: int) -> list[dict[str, float]]:
    case, model = sharded({"dp": 2, "tp": 2}, FSDP_MEGATRON, name="gpt")
    return [_steps(case, model, foreach) for foreach in (False, True)]


def _steps(case: Case, model: Any, foreach: bool) -> dict[str, float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    reference = torch.optim.AdamW(case.model.parameters(), lr=1e-2, foreach=foreach)
    parts = model.shard(*case.args)
    worst = {"loss": 0.0, "norm": 0.0}
    for _ in range(2):
        loss, expected = model(*parts), case.model(*case.args)
        loss.backward()
        expected.backward()
        norm, expected_norm = (clip_grad_norm_(m.parameters(), 0.1, foreach=foreach) for m in (model, case.model))
        assert isinstance(norm, DTensor)
        worst["loss"] = max(worst["loss"], float((loss - expected).abs()))
        worst["norm"] = max(worst["norm"], float((norm.full_tensor() - expected_norm).abs()))
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
        optimizer.load_state_dict(deepcopy(reference.state_dict()))  # plain tensors, of which each rank takes its part
    return worst | {"parameters": difference(values_of(model), values_of(case.model))}


def test_adamw_and_clipping_see_one_devices_gradients() -> None:
    for worst in chain(*run_on_ranks(_train, 4)):
        assert max(worst.values()) < 1e-10, worst


def _stored(rank: int) -> tuple[int, int]:
    case, model = sharded({"dp": 4}, {"dp": "fsdp"})
    model(*model.shard(*case.args)).backward()
    stored = sum(p.to_local().numel() + p.grad.to_local().numel() for p in model.parameters())
    allowed = sum(2 * (p.numel() // 4 + p[0].numel()) for p in case.model.parameters())
    return stored, allowed


def test_fsdp_stores_its_share_of_parameters_and_gradients() -> None:
    for stored, allowed in run_on_ranks(_stored, 4):
        assert stored <= allowed


def _checkpoint(rank: int, folder: str) -> dict[str, float]:
    case, model = sharded({"dp": 2, "tp": 2}, FSDP_MEGATRON)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(one: Any, of: Any) -> None:
        of.zero_grad()
        one(*one.shard(*case.args)).backward()
        of.step()

    step(model, optimizer)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = {"full_state_dict": difference(values_of(model), whole)}
    parameters, state = get_state_dict(model, optimizer)
    save({"model": parameters, "optimizer": state}, checkpoint_id=folder)

    _, other = sharded({"a": 4, "b": 1}, {"a": "fsdp", "b": "ddp"})
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    step(other, other_optimizer)
    step(other, other_optimizer)
    parameters, state = get_state_dict(other, other_optimizer)
    load({"model": parameters, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=parameters, optim_state_dict=state)
    found["another mesh"] = difference(values_of(model), values_of(other))
    step(model, optimizer)
    step(other, other_optimizer)
    found["the step after"] = difference(values_of(model), values_of(other))

    save({"model": other.state_dict()}, checkpoint_id=f"{folder}/back")
    _, third = sharded({"dp": 2, "tp": 2}, FSDP_MEGATRON)
    load({"model": third.state_dict()}, checkpoint_id=f"{folder}/back")
    found["and back, in place"] = difference(values_of(other), values_of(third))
    third.load_state_dict(whole)
    found["whole tensors"] = difference(values_of(third), whole)
    third.load_state_dict(other.state_dict())
    found["DTensors of another mesh"] = difference(values_of(other), values_of(third))
    return found


def test_checkpoints_load_on_another_mesh(tmp_path: Path) -> None:
    for found in run_on_ranks(_checkpoint, 4, str(tmp_path)):
        assert max(found.values()) < 1e-10, found


def _lazy(rank: int) -> float:
    case, model = sharded({"dp": 2, "tp": 2}, FSDP_MEGATRON, now=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = list(model.parameters())
    coordinate = rank // 2
    parts = tuple(arg.chunk(2)[coordinate] for arg in case.args)
    model(*parts).backward()
    assert all(now is before for now, before in zip(model.parameters(), kept, strict=True))
    assert any(p.placements[1].is_shard() for p in kept)
    optimizer.step()
    case.model(*case.args).backward()
    torch.optim.SGD(case.model.parameters(), lr=0.1).step()
    return difference(values_of(model), values_of(case.model))


def test_parameters_are_cut_in_place_at_the_first_call() -> None:
    assert max(run_on_ranks(_lazy, 4)) < 1e-10


def _samples(rank: int) -> list[int]:
    _, model = sharded({"dp": 2, "tp": 2}, FSDP_MEGATRON)
    numbers: Any = list(range(8))
    return list(model.sampler(numbers, shuffle=False))


def test_the_sampler_splits_samples_over_data_axes_alone() -> None:
    assert run_on_ranks(_samples, 4) == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]


def _compile(rank: int, cache: str) -> tuple[int, int, bool, str]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    case, model = sharded({"tp": 2}, {"tp": "megatron"}, mode="inductor")
    loss = model(*model.shard(*case.args))
    loss.backward()
    equal = float((loss - case.model(*case.args)).abs()) < 1e-10
    counted = counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]
    _, padded = sharded({"dp": 2}, {"dp": "fsdp"}, name="mlp_uneven")
    return *counted, equal, padded.plan.graph("LOCAL")


@pytest.fixture(scope="module", name="fresh")
def _fresh(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, int, bool, str]]:
    """Return what two processes that share no seed of hashes report; to start them takes most of the time."""
    return run_on_ranks(_compile, 2, str(tmp_path_factory.mktemp("cache")), fresh=True)


def test_one_rank_of_a_host_compiles_and_the_others_find_its_code(fresh: list[tuple[int, int, bool, str]]) -> None:
    first, other = (report[:3] for report in fresh)
    assert first == (2, 0, True)
    assert other == (0, 2, True)


def test_ranks_make_one_graph_whatever_the_order_of_sets(fresh: list[tuple[int, int, bool, str]]) -> None:
    assert len({graph for *_, graph in fresh}) == 1


REFUSED = {"Adafactor", "Rprop"}  # by DTensor, of torch 2.13, as the README says
WHOLE = "Adafactor, of parameters that are not sharded"  # which the docs say trains
SPARSE = {"SparseAdam"}  # of sparse gradients only


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizers of `torch.optim` for dense gradients, by name."""
    classes = {name: one for name, one in vars(torch.optim).items() if isinstance(one, type)}
    found = {name: one for name, one in classes.items() if issubclass(one, torch.optim.Optimizer)}
    return {name: one for name, one in found.items() if name not in {"Optimizer", *SPARSE}}


def _optimized(rank: int) -> dict[str, float]:
    """Return how far three steps of each optimizer are from those on one device; infinity where it raises."""
    found = {}
    sharded = [(name, kind, "fsdp") for name, kind in optimizers().items()]
    for name, kind, recipe in [*sharded, (WHOLE, torch.optim.Adafactor, "ddp")]:
        torch.manual_seed(0)
        plain, x = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)), torch.randn(8, 6)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model: Any = autoshard(plain, mesh, (x,), options=Options(recipe=recipe, compile="eager"))
        try:
            for trained, given in ((plain, (x,)), (model, model.shard(x))):
                _three_steps(trained, given, kind)
            found[name] = difference(values_of(plain), values_of(model))
        except RuntimeError:
            found[name] = float("inf")
    return found


def _three_steps(model: nn.Module, given: tuple[Tensor, ...], kind: Any) -> None:
    optimizer = kind(model.parameters(), lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(*given).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def test_optimizers_train_as_on_one_device_but_for_those_that_the_docs_name() -> None:
    for found in run_on_ranks(_optimized, 2):
        assert len(found) > 10
        assert {name for name, off in found.items() if off > 2e-3} <= REFUSED
