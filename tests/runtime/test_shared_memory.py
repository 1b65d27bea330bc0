"""Memory that ranks share for operators which send: how much, and what is said where they cannot."""

from __future__ import annotations

from unittest import mock

import pytest
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from autoshard import Options, Overlap
from autoshard.runtime import shared_memory
from autoshard.runtime.agreement import _collectives
from autoshard.runtime.shared_memory import check_devices, share_memory, shared_bytes
from passes.errors import MeshError, UserError
from passes.ir.matmul_chunks.one_operator import make_one
from passes.ir.matmul_chunks.sites import sites_in
from tests.passes.sites import gather, read, scatter


def _graphs() -> list[GraphModule]:
    graphs = [read(gather(1, 8, 6, kept=False)), read(scatter(1, 8, 6, kept=False))]
    for gm in graphs:
        make_one(sites_in(gm)[0], "test")
    return graphs


def test_the_largest_part_that_an_operator_sends_is_shared() -> None:
    parts = [shared_bytes([gm]) for gm in _graphs()]
    assert parts == [{"autoshard:tp=2:tp": 8 * 6 * 8}, {"autoshard:tp=2:tp": 2 * 8 * 6 * 4}]  # terms for two ranks
    with mock.patch.object(shared_memory, "reserve_symmetric_memory") as reserve:
        share_memory(_graphs())
    reserve.assert_called_once_with("autoshard:tp=2:tp", 2 * 8 * 6 * 4)


def test_ranks_compare_the_operators_that_they_issue() -> None:
    assert_expected_inline("\n".join(_collectives(_graphs())), """\
at collective 1 of the forward, autoshard.all_gather_matmul over tp of f64[8, 6] (%all_gather_matmul)
at collective 1 of the backward, autoshard.matmul_reduce_scatter over tp of f32[16, 3] (%matmul_reduce_scatter)""")


def test_devices_that_share_no_memory_are_told_of() -> None:
    check_devices(Options(overlap=Overlap(symmetric_memory=True)), "cuda")
    check_devices(Options(), "cpu")
    with pytest.raises(UserError) as asked:
        check_devices(Options(overlap=Overlap(symmetric_memory=True)), "cpu")
    refused = RuntimeError("no access from 0 to 4")
    with mock.patch.object(shared_memory, "reserve_symmetric_memory", side_effect=refused), pytest.raises(MeshError) as far:
        share_memory(_graphs())
    assert_expected_inline(f"{asked.value}\n{far.value}", """\
Options(overlap=Overlap(symmetric_memory=True)): the mesh is of cpu devices, and only CUDA's reach each other's memory; leave it out
the ranks of autoshard:tp=2:tp do not reach each other's memory; leave out Options(overlap=Overlap(symmetric_memory=True)), or put them on one node whose GPUs NVLink joins. (no access from 0 to 4)""")  # noqa: E501
