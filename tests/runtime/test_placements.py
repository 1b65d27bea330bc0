"""One rank's part as DTensor stores it: cut, padded, told in boxes, and put together again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard

from autoshard.runtime.parameters import distributed_tensor, place_of
from autoshard.runtime.placements import Storage, dtensor_placements, layout_of_placements
from passes._torch import strided_shard
from passes.errors import ConstraintError
from passes.ir.layout import Layout, R, Shard, assemble, is_storable, local_part
from passes.ir.mesh import Mesh
from tests.spawn import run_on_ranks

MESH = Mesh("dp=2,tp=2")
SHAPES = ((12, 8), (24, 4), (7, 5), (6, 8), (9, 4), (1, 8))
PLACEMENTS = (R, Shard(0), Shard(0, 2), Shard(0, 3), Shard(0, 6), Shard(1), Shard(1, 2))


def storable() -> Iterator[tuple[Layout, tuple[int, int]]]:
    for shape, left, right in itertools.product(SHAPES, PLACEMENTS, PLACEMENTS):
        layout = Layout((left, right))
        if (left != right or left == R) and is_storable(layout, shape, MESH):
            yield layout, shape


def whole_of(shape: tuple[int, int]) -> torch.Tensor:
    return torch.arange(1.0, shape[0] * shape[1] + 1).reshape(shape)


def stored(layout: Layout, shape: tuple[int, int], coordinate: tuple[int, ...]) -> Storage:
    return Storage(layout, shape, MESH, coordinate)


def test_there_are_even_and_uneven_cases() -> None:
    cases = list(storable())
    assert len(cases) > 100
    even = [stored(layout, shape, (0, 0)).is_even for layout, shape in cases]
    assert 20 < sum(even) < len(cases) - 20


def test_padding_gives_the_part_that_a_graph_wants() -> None:
    for layout, shape in storable():
        for coordinate in MESH.coordinates():
            storage, whole = stored(layout, shape, coordinate), whole_of(shape)
            part = storage.part_of(whole)
            assert tuple(part.shape) == storage.local_shape
            assert torch.equal(storage.pad(part), local_part(whole, layout, MESH, coordinate))
            assert torch.equal(storage.unpad(storage.pad(part)), part)


def test_padded_parts_of_all_ranks_are_the_whole() -> None:
    for layout, shape in storable():
        whole = whole_of(shape)
        parts = [stored(layout, shape, c).pad(stored(layout, shape, c).part_of(whole)) for c in MESH.coordinates()]
        assert torch.equal(assemble(parts, shape, layout, MESH), whole)


def test_boxes_say_where_every_element_of_a_part_belongs() -> None:
    for layout, shape in storable():
        for coordinate in MESH.coordinates():
            storage, whole = stored(layout, shape, coordinate), whole_of(shape)
            part, found = storage.part_of(whole), torch.zeros(storage.local_shape)
            for box in storage.boxes():
                source, target = whole, found
                for dim, (start, length, at) in enumerate(zip(box.offsets, box.sizes, box.local_offsets, strict=True)):
                    source, target = source.narrow(dim, start, length), target.narrow(dim, at, length)
                target.copy_(source)
            assert torch.equal(found, part)


def test_placements_of_dtensor_and_layouts_are_the_same_thing() -> None:
    for layout, _ in storable():
        assert layout_of_placements(dtensor_placements(layout, MESH), MESH) == layout


def test_fsdp_inside_tensor_parallelism_is_a_strided_shard() -> None:
    layout = Layout((Shard(0, 2), Shard(0)))
    assert dtensor_placements(layout, MESH) == (strided_shard(0, 2), DShard(0))


def test_fused_projection_counts_blocks_of_what_is_left() -> None:
    layout = Layout((Shard(0, 6), Shard(0, 3)))
    assert dtensor_placements(layout, MESH) == (strided_shard(0, 6), strided_shard(0, 3))
    assert dtensor_placements(Layout((Shard(0, 3), Shard(0, 6))), MESH) == (strided_shard(0, 3), strided_shard(0, 3))


def test_a_remainder_outside_of_another_axis_cannot_be_stored() -> None:
    with pytest.raises(ConstraintError) as error:
        stored(Layout((Shard(0), Shard(0, 2))), (7, 4), (0, 0))
    assert str(error.value) == (
        "shape [7, 4] cannot be stored as {dp:S(0), tp:S(0/2)} on dp=2,tp=2: only the innermost axis of a dim may "
        "leave a remainder; choose other axes or another dim"
    )


def test_a_placement_of_unknown_kind_is_refused() -> None:
    with pytest.raises(ConstraintError, match="mesh dp=2,tp=2 needs 2 placements"):
        layout_of_placements((DReplicate(),), MESH)


def _wrong_full_tensors(rank: int) -> list[str]:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    place = place_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    wrong = []
    for layout, shape in storable():
        whole, storage = whole_of(shape), place.storage(layout, shape)
        made = distributed_tensor(storage.part_of(whole).contiguous(), storage, place)
        state = torch.zeros_like(made).add_(made)  # as optimizers make theirs
        assert isinstance(state, DTensor)
        if not torch.equal(made.full_tensor(), whole) or not torch.equal(state.full_tensor(), whole):
            wrong.append(f"{shape} {layout.format(place.mesh)}")
    return wrong


@pytest.mark.gloo
@pytest.mark.slow
def test_full_tensor_of_every_storable_layout_is_the_whole() -> None:
    assert run_on_ranks(_wrong_full_tensors, 4) == [[], [], [], []]
