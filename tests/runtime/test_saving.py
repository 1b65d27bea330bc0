"""`save_pretrained` of a library saves a sharded model as its own class, with the parameters of one device."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import Options, autoshard
from tests.spawn import run_on_ranks


class Pretrained(nn.Module):
    """Saves as transformers and diffusers do: what its own state_dict says, and the name of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.head(self.norm(self.embedding(ids))).square().mean()
        return loss

    def save_pretrained(self, folder: str, *, name: str = "model") -> str:
        shared = {id(one): key for key, one in self.named_parameters(remove_duplicate=False)}
        what = {"class": type(self).__name__, "tied": len(shared), "state": self.state_dict()}
        assert all(type(value) is Tensor for value in self.state_dict().values())
        torch.save(what, Path(folder) / name)
        return name


def train(mesh: DeviceMesh, recipe: str) -> Any:
    torch.manual_seed(0)
    model: Any = autoshard(Pretrained().double(), mesh, options=Options(recipe=recipe, compile="eager"))
    ids = torch.arange(8) % 6
    model(*model.shard(ids)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def check_saved(path: Path) -> None:
    torch.manual_seed(0)
    one = Pretrained().double()
    one(torch.arange(8) % 6).backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    saved = torch.load(path)
    assert saved["class"] == "Pretrained" and saved["tied"] == 3
    torch.testing.assert_close(saved["state"], dict(one.state_dict()), rtol=1e-12, atol=1e-12)


def test_the_model_is_saved_as_its_own_class(one_rank: DeviceMesh, tmp_path: Path) -> None:
    model = train(one_rank, "fsdp")
    assert model.save_pretrained(str(tmp_path), name="named") == "named"
    check_saved(tmp_path / "named")
    assert len(model.programs) == 1 and model(torch.arange(8) % 6).isfinite() and len(model.programs) == 1


def test_a_class_without_the_method_has_none(one_rank: DeviceMesh) -> None:
    model = autoshard(nn.Linear(2, 2), one_rank, options=Options(recipe="fsdp", compile="eager"))
    with pytest.raises(AttributeError, match="'ShardedLinear' object has no attribute 'save_pretrained'"):
        _ = model.save_pretrained


def _save(rank: int, folder: str) -> str:
    model = train(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), "fsdp")
    model.save_pretrained(folder)
    assert (Path(folder) / "model").exists()  # for all ranks, when the call returns
    try:
        model.save_pretrained(f"{folder}/not there")
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_save_together(tmp_path: Path) -> None:
    first, second = run_on_ranks(_save, 2, str(tmp_path))
    check_saved(tmp_path / "model")
    assert first.startswith("RuntimeError: ")
    assert second.startswith("DistributedError: save_pretrained failed on rank 0: RuntimeError: ")


def _assign(rank: int) -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = train(mesh, "fsdp")
    whole = {name: torch.full(p.shape, float(rank + 1), dtype=p.dtype) for name, p in model.named_parameters()}
    whole |= {"head.weight": whole["embedding.weight"]}
    model.load_state_dict(whole, strict=False, assign=True)
    torch.save(model.state_dict(), io.BytesIO())
    parts = [p.to_local() for p in model.parameters()]
    return [(part.untyped_storage().nbytes(), part.nbytes) for part in parts]


@pytest.mark.gloo
@pytest.mark.slow
def test_parameters_that_are_loaded_by_assignment_keep_nothing_of_the_whole() -> None:
    for found in run_on_ranks(_assign, 2):
        assert all(held == nbytes for held, nbytes in found)
