"""Remember the whole batches that `model.shard` cut, and compare those of all ranks in the first call of a kind."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autoshard.runtime.agreement import digest, exchange
from autoshard.runtime.process_groups import MeshGroups
from passes.ir.layout import Layout, Shard

UNLIKE = (
    "the ranks of axis %r gave model.shard(...) unlike batches, by %s: each took its part of its own batch, and the samples in "
    "the other parts are left out. Give every rank the same batch, as a loader with one seed does, or let each rank load its "
    "part alone with model.sampler(...), and call the model without model.shard"
)

_CUT = WeakIdKeyDictionary()  # this rank's part of a tensor -> the whole


@dataclass(frozen=True)
class _Whole:
    """A tensor that was cut; it is not kept alive, and its values count as long as nothing was written to it."""

    shape: tuple[int, ...]
    tensor: weakref.ref[torch.Tensor]
    version: int | None

    def digest(self) -> str | None:
        tensor = self.tensor()
        return None if tensor is None or tensor.is_meta or _version(tensor) != self.version else digest(tensor)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def remember(part: torch.Tensor, whole: torch.Tensor) -> None:
    """Remember that `part` is this rank's part of `whole`."""
    _CUT[part] = _Whole(tuple(whole.shape), weakref.ref(whole), _version(whole))


def whole_shape(part: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape of what `part` was cut from; None if it is not such a part."""
    return _CUT[part].shape if part in _CUT else None


def unlike_wholes(
    groups: MeshGroups, tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout]
) -> dict[str, Sequence[str]]:
    """Return axes whose ranks cut unlike batches, with the paths of the inputs that differ; all ranks ask together.

    Each rank keeps its part of the batch that it has, so samples in other parts of a batch that no other rank has are left out.
    """
    if groups.mesh.size == 1:
        return {}
    digests = {path: _CUT[part].digest() for path, part in tensors.items() if part in _CUT}
    of_ranks = exchange(groups, [digests.get(path) for path in layouts])
    found: dict[str, Sequence[str]] = {}
    for axis, name in enumerate(groups.mesh.names):
        split = [(number, path) for number, (path, layout) in enumerate(layouts.items()) if isinstance(layout.on(axis), Shard)]
        places = groups.mesh.groups((name,))
        seen = {path: [{of_ranks[place][number] for place in group} for group in places] for number, path in split}
        if unlike := [path for path, values in seen.items() if any(None not in each and len(each) > 1 for each in values)]:
            found[name] = unlike
    return found
