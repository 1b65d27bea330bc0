"""Bytes that one training step really takes: one rank of a mesh, with collectives that move nothing, on CPU.

Memory is what PyTorch's CPU allocator reports to the profiler, so code that Inductor generates is measured as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.compile.compiled import Mode, Split, compile_split
from autoshard.runtime.process_groups import axes_used
from passes._torch import register_group, unregister_group
from passes.ir.graph import InputRole
from passes.ir.mesh import Mesh


@contextmanager
def one_of(mesh: Mesh, split: Split) -> Iterator[None]:
    """Rank 0 of `mesh`, alone: its groups exist, and its collectives give what memory held before."""
    dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    graphs = [split.forward] if split.backward is None else [split.forward, split.backward]
    names = []
    try:
        for axes in axes_used(graphs, mesh):
            names.append(mesh.group_name(axes))
            register_group(names[-1], dist.new_group(list(mesh.groups(axes)[0])))
        yield
    finally:
        for name in names:
            unregister_group(name)
        dist.destroy_process_group()


def measure_step(split: Split, mesh: Mesh, *, mode: Mode) -> int:
    """Return the most bytes that are live at once in a step of `split`: the batch, the model's state, AdamW's and all else."""
    with one_of(mesh, split):
        program = compile_split(split, mode=mode)
        state = [_tensor(value) for value in split.input_values]
        names = [given.name for given in split.inputs]
        parameters = {
            given.name: nn.Parameter(tensor)
            for given, tensor in zip(split.inputs, state, strict=True)
            if given.role is InputRole.PARAMETER
        }
        optimizer = torch.optim.AdamW(parameters.values(), foreach=False)
        tangents = [_tensor(value) for value in split.tangent_values]

        def step() -> None:
            outputs, buffers, saved = program.forward(list(state))
            del buffers
            gradients = program.backward(saved, list(tangents))
            for gradient, part in zip(split.gradients, gradients, strict=True):
                if gradient.name in parameters:
                    parameters[gradient.name].grad = part
            del outputs, gradients, part

        step()
        optimizer.step()
        optimizer.zero_grad()
        held = [*state, *tangents, *(value for kept in optimizer.state.values() for value in kept.values())]
        del names
        return _nbytes(held) + _peak(step)


def _peak(step: object) -> int:
    """Return the most bytes that `step` holds beside what was there before."""
    assert callable(step)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes), default=0)


def _tensor(value: Tensor) -> Tensor:
    made = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)
    return made.fill_(0.01) if made.dtype.is_floating_point else made.zero_()


def _nbytes(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
