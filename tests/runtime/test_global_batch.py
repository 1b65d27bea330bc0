"""A global batch is cut before there is a plan so that a call with the parts is taken for one with the batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard import CaptureError, InputError, Options
from autoshard.runtime.call_errors import with_joined
from autoshard.runtime.calls.global_batch import _is_clear, _like_first
from autoshard.runtime.calls.programs import FirstCall
from autoshard.runtime.global_call import Splits
from autoshard.runtime.program_planner import ProgramPlanner
from autoshard.runtime.whole_tensor import WholeTensor
from passes.ir.layout import Layout, R, Shard
from passes.ir.mesh import Mesh


def test_a_tensor_as_long_as_a_part_of_the_batch_is_not_taken_for_one() -> None:
    splits = Splits(Mesh("dp=2"), (0,), None)
    tokens, mask = torch.zeros(8, 4), torch.zeros(4, 4)
    parts = {"tokens": tokens[:4], "mask": mask}
    assert _is_clear("tokens", parts, tokens, splits)
    assert not _is_clear("mask", parts, mask, splits)  # it would be taken for a part of one of [8, 4]
    assert _is_clear("mask", {"tokens": tokens[:4], "mask": mask[:3]}, mask[:3], splits)


def test_tensors_beyond_those_of_the_model_are_cut_like_its_first_input() -> None:
    """On the leading dims that are as long: labels of a sample have no positions, and the weights of classes no samples."""
    place: Any = SimpleNamespace(mesh=Mesh("dp=2,cp=2"), coordinate=(1, 0), device=torch.device("cpu"))
    first, layout = torch.zeros(4, 8, 3), Layout((Shard(0), Shard(1)))
    cut = partial(_like_first, first=first, part=first[2:, :4], layout=layout, place=place)
    labels, classes = torch.arange(32).reshape(4, 8), torch.randn(5)
    assert cut(labels).equal(labels[2:, :4]) and cut(labels[:, 0]).equal(labels[2:, 0])
    assert cut(labels[:, :3]).equal(labels[2:, :3])
    assert cut(classes) is classes and cut(2) == 2
    part = cut(labels[:, 0])
    with pytest.raises(InputError, match=r"a tensor beyond the model's arguments is int64\[2\], this rank's part of int64\[4\]"):
        _like_first(part, first[:2], first[1:2, :4], layout, place)
    with pytest.raises(InputError) as error:
        cut(labels.to("meta"))
    assert str(error.value) == (
        "a tensor beyond the model's arguments is on meta, where tensors have no values; give model.shard one on cpu"
    )


def test_labels_of_a_batch_that_axes_do_not_divide_are_used_like_any_tensor(one_rank: DeviceMesh) -> None:
    place: Any = SimpleNamespace(device=torch.device("cpu"), mesh=one_rank, device_mesh=one_rank)
    labels, weights = torch.tensor([2, 0, 1]), torch.tensor([0.5, 1.0, 2.0])
    first, part = torch.randn(3, 4), DTensor.from_local(torch.randn(3, 4), one_rank, [Replicate()])
    whole = _like_first(labels, first, part, Layout((R,)), place)
    assert type(whole) is WholeTensor and whole.tolist() == labels.numpy().tolist() == whole.numpy().tolist()
    assert weights[whole].equal(weights[labels]) and (whole + torch.ones(3)).equal(labels + 1.0)
    assert whole[whole > 0].equal(labels[labels > 0]) and len(whole.unique()) == 3
    assert type(_like_first(labels, first, part, Layout((Shard(1),)), place)) is DTensor  # outputs are parts of the sequence


@pytest.mark.parametrize("options", [Options(recipe={"dp": "fsdp", "cp": "context"}), Options()])
def test_how_a_sequence_is_split_is_not_known_before_a_plan(options: Options) -> None:
    splits = ProgramPlanner("cpu", Mesh("dp=2,cp=2"), options, None).splits()
    assert splits.data_axes == (0,)
    with pytest.raises(InputError) as error:
        splits.whole("tokens", torch.zeros(4, 4), 4)
    assert str(error.value) == (
        "how axis 'cp' splits the input 'tokens' is known once the model is captured: give one global batch to "
        "autoshard(..., args=...) or kwargs=, or say it: Options(inputs={'tokens': {'cp': 'S(1)'}})"
    )
    options = Options(recipe={"dp": "fsdp", "cp": "context"}, inputs={"tokens": {"cp": "S(1)"}})
    splits = ProgramPlanner("cpu", Mesh("dp=2,cp=2"), options, None).splits()
    assert splits.whole_shape("tokens", torch.zeros(4, 4), 4) == (8, 8)


class Adds(nn.Module):
    """Adds its inputs, and what an adapter makes of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6, bias=False)
        self.adapter: nn.Module = nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not isinstance(self.adapter, nn.Identity):
            return self.layer(x) + y + self.adapter(x)
        return self.layer(x) + y


class Attends(nn.Module):
    """Joins the positions of [positions, batch, features] by a mask of [positions, positions]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return mask @ self.layer(x).flatten(1)


def failure(planner: ProgramPlanner, model: nn.Module, *args: Tensor) -> str:
    with pytest.raises(CaptureError) as error:
        planner(FirstCall(model, args, {}, True, None), None)
    return str(error.value).partition("\n")[0]


def test_joined_inputs_are_no_reason_where_a_model_fails_for_the_parts_too() -> None:
    planner = ProgramPlanner("cpu", Mesh("dp=2"), Options(recipe="fsdp"), None)
    assert failure(planner, Adds(), torch.zeros(3, 5), torch.zeros(3, 6)) == (
        "the model fails for these arguments, as it would on one device: a and b must have same reduction dim, but got [6, 5] X "
        "[4, 6]."
    )
    assert failure(planner, Attends(), torch.zeros(5, 3, 4), torch.zeros(5, 5)).endswith(
        "Dim 0 of 'x', 'mask' was taken for the batch, and the ranks' parts were joined there; where the batch is another dim, "
        "give Options(inputs={'mask': {'dp': 'S(1)'}}), or 'R' for one that has no batch"
    )


def test_a_batch_that_is_not_dim_0_is_to_be_named_on_all_axes_that_split_it() -> None:
    hybrid = Mesh("r=2,s=2,tp=2")
    options = Options(recipe={"r": "ddp", "s": "fsdp", "tp": "megatron"})
    assert failure(ProgramPlanner("cpu", hybrid, options, None), Attends(), torch.zeros(5, 3, 4), torch.zeros(5, 5)).endswith(
        "give Options(inputs={'mask': {'r': 'S(1)', 's': 'S(1)'}}), or 'R' for one that has no batch"
    )


def test_parameters_that_were_added_are_named_where_a_model_fails() -> None:
    planner = ProgramPlanner("cpu", Mesh("dp=2"), Options(recipe="fsdp"), None)
    model, args = Adds(), (torch.zeros(3, 4), torch.zeros(3, 6))
    planner(FirstCall(model, args, {}, True, None), None)
    model.adapter = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3))  # the rank's part of 6
    assert failure(planner, model, *args) == (
        "the model fails for these arguments: Attempting to broadcast a dimension of length 3 at -1! Mismatching argument at "
        "index 1 had torch.Size([6, 3]); but expected shape should be broadcastable to [6, 6]. Parameters were added after the "
        "model was sharded: 'adapter.0.weight', 'adapter.0.bias' and 2 more; where their shapes are those of a rank's part of "
        "another parameter, add them before autoshard(...)"
    )


def test_a_container_that_shard_returned_is_to_be_unpacked() -> None:
    planner = ProgramPlanner("cpu", Mesh("dp=2"), Options(recipe="fsdp"), None)
    parts: Any = torch.zeros(3, 4)
    ends = ". The call has one argument, which is a container; where model.shard returned it, unpack it: "
    assert failure(planner, nn.Linear(4, 4), (parts,)) == (
        "the model fails for these arguments, as it would on one device: linear(): argument 'input' (position 1) must be Tensor, "
        f"not tuple{ends}model(*model.shard(x))"
    )
    told = failure(planner, nn.Linear(4, 4), {"input": parts})
    assert told.endswith(f"not dict{ends}model(**model.shard(x=x))")


def test_joined_inputs_are_named_where_a_model_fails_for_them() -> None:
    model, args, splits = torch.nn.Linear(4, 4), (torch.zeros(2, 4),), Splits(Mesh("dp=2"), (0,), None, is_planned=False)
    error = CaptureError("the model fails.\n  model.py:3: a @ b", for_arguments=True)
    assert str(with_joined(error, model, args, {}, splits)) == (
        "the model fails. Dim 0 of 'input' was taken for the batch, and the ranks' parts were joined there; where the batch is "
        "another dim, give Options(inputs={'input': {'dp': 'S(1)'}}), or 'R' for one that has no batch\n  model.py:3: a @ b"
    )
    assert with_joined(CaptureError("it branches"), model, args, {}, splits) is None
    assert with_joined(error, model, args, {}, Splits(Mesh("dp=2"), (), None)) is None  # no axis splits the batch
    assert with_joined(error, model, args, {}, replace(splits, inputs={"input": {"dp": "S(0)"}})) is None  # the user says so
