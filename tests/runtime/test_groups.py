"""Process groups under names that are equal on every rank, on real ranks."""

from __future__ import annotations

from collections import deque
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import Graph, GraphModule

from autoshard.config.topology import mesh_of
from autoshard.runtime.process_groups import add_groups, axes_used, open_groups
from passes._torch import group_timeout, registered_group
from passes.errors import MeshError
from passes.ir.mesh import Mesh
from tests.spawn import reports_of_ranks, run_on_ranks

c10d = torch.ops._c10d_functional

GATHERS, UNDER_WAY = 10_000, 30


def test_a_group_that_sends_nothing_is_refused() -> None:
    with mock.patch("torch.distributed.get_backend", return_value="fake"), pytest.raises(MeshError) as error:
        open_groups(mock.Mock(), Mesh("dp=4"))
    assert str(error.value) == (
        "the process group is a fake one, which sends nothing between ranks; train under torchrun with gloo or nccl, or call "
        "autoshard.plan(model, Mesh('dp=4'), args), which needs no process group"
    )


def _gather(value: int, size: int, name: str) -> list[int]:
    whole: list[int] = c10d.wait_tensor(c10d.all_gather_into_tensor(torch.tensor([value]), size, name)).tolist()
    return whole


def _gathered(rank: int) -> dict[str, list[int]]:
    device_mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    mesh = mesh_of(device_mesh)
    axes = (("pp",), ("dp",), ("pp", "tp"), ("pp", "dp", "tp"))
    groups = open_groups(device_mesh, mesh, axes)
    sizes = (2, 1, 4, 4)
    found = {name: _gather(rank, size, name) for name, size in zip(groups.names, sizes, strict=True)}
    groups.close()
    assert not any(registered_group(name) is not None for name in groups.names)
    return found


@pytest.mark.gloo
@pytest.mark.slow
def test_groups_join_ranks_that_differ_on_their_axes() -> None:
    prefix = "autoshard:pp=2,dp=1,tp=2"
    for rank, found in enumerate(run_on_ranks(_gathered, 4)):
        assert found == {
            f"{prefix}:pp": [rank % 2, rank % 2 + 2],
            f"{prefix}:dp": [rank],
            f"{prefix}:pp.tp": [0, 1, 2, 3],
            f"{prefix}:pp.dp.tp": [0, 1, 2, 3],
        }


def _halves(rank: int) -> list[int]:
    world = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    device_mesh = world["dp", "tp"]
    mesh = mesh_of(device_mesh)
    groups = open_groups(device_mesh, mesh, (("tp",),))
    assert group_timeout(groups.control) == group_timeout(device_mesh.get_group("tp"))
    groups = add_groups(groups, (("dp", "tp"),))
    return _gather(rank, 2, groups.names[-1])


@pytest.mark.gloo
@pytest.mark.slow
def test_meshes_of_a_part_of_the_world_do_not_wait_for_the_rest() -> None:
    assert run_on_ranks(_halves, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def _gathers_under_way(rank: int) -> None:
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    groups = open_groups(device_mesh, mesh_of(device_mesh), (("dp",),))
    under_way: deque[tuple[int, torch.Tensor]] = deque()
    for number in range(GATHERS + UNDER_WAY):
        if number < GATHERS:
            part = torch.full((256,), float(2 * number + rank))
            under_way.append((number, c10d.all_gather_into_tensor(part, 2, groups.names[0])))
        if under_way and (len(under_way) == UNDER_WAY or number >= GATHERS):
            first, whole = under_way.popleft()
            ends = c10d.wait_tensor(whole)[[0, 255, 256, 511]]
            assert ends.tolist() == [2 * first, 2 * first, 2 * first + 1, 2 * first + 1]


@pytest.mark.gloo
@pytest.mark.slow
def test_many_gathers_under_way_give_what_was_sent() -> None:
    """Torch's own kernel would end a rank in malloc within the first thousands, most times."""
    run_on_ranks(_gathers_under_way, 2)


def _with_another(rank: int) -> list[int]:
    dist.new_group([0])  # of which the others are not: rank 0 is in one group more
    device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    opened = [open_groups(device_mesh, mesh_of(device_mesh), (("dp", "tp"),)) for _ in range(2)]
    return _gather(rank, 2, opened[0].names[0])


@pytest.mark.gloo
@pytest.mark.slow
def test_a_rank_may_be_in_other_groups_besides() -> None:
    assert run_on_ranks(_with_another, 2) == [[0, 1]] * 2


def _outside(rank: int) -> str:
    device_mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    try:
        open_groups(device_mesh, mesh_of(device_mesh))
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.gloo
@pytest.mark.slow
def test_a_rank_outside_of_the_mesh_is_told_so() -> None:
    assert run_on_ranks(_outside, 3) == ["", "", "rank 2 is not in the mesh dp=2 of ranks [0, 1]"]


def _descending(rank: int) -> None:
    device_mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",))
    open_groups(device_mesh, mesh_of(device_mesh), (("dp",),))


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_in_descending_order_are_refused() -> None:
    reports = reports_of_ranks(_descending, 2)
    assert [report.message for report in reports] == [
        "axes dp of mesh dp=2 join ranks [1, 0]; list them in ascending order"
    ] * 2


def test_axes_are_read_from_the_collectives_of_graphs() -> None:
    mesh = Mesh("dp=2,tp=2")
    graph = Graph()
    value = graph.placeholder("x")
    for axes in (("tp",), ("dp", "tp"), ("tp",), ("dp",)):
        value = graph.call_function(c10d.all_reduce.default, (value, "sum", mesh.group_name(axes)))
    graph.output((value,))
    gm = GraphModule(torch.nn.Module(), graph)
    assert axes_used((gm, gm), mesh) == (("dp",), ("dp", "tp"), ("tp",))


def test_one_rank_has_groups_too(one_rank: DeviceMesh) -> None:
    groups = open_groups(one_rank, mesh_of(one_rank), (("dp",),))
    assert dist.get_world_size(groups.control) == 1
    groups.close()
