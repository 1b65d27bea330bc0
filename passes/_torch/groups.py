"""Process groups: what functional collectives find under a name, and gloo's gathers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group
from torch.distributed import distributed_c10d

_DISTRIBUTED: Any = distributed_c10d  # one of its functions is replaced for a moment
_LIBRARIES: Any = torch.library  # not typed
_FUNCTIONAL = _LIBRARIES.Library("_c10d_functional", "IMPL")
_MADE: Counter[tuple[int, ...]] = Counter()  # groups that this process has made, by their ranks


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let functional collectives find `group` under `name`."""
    _register_process_group(name, group)  # type: ignore[arg-type]


def unregister_group(name: str) -> None:
    _unregister_process_group(name)  # type: ignore[arg-type]


def is_group_registered(name: str) -> bool:
    try:
        _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return False
    return True


def new_group(ranks: Sequence[int], *, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """A group that its own ranks make, and no others have to.

    Torch names such a group by how many groups the process is in. Where one rank is in others besides, the names differ,
    and the ranks wait for each other until the timeout. Here it is how many groups of these very ranks were made.
    """
    ordered = tuple(sorted(ranks))
    number = _MADE[ordered]
    _MADE[ordered] += 1
    with _group_named(f"autoshard:{'_'.join(map(str, ordered))}:{number}"):
        made: dist.ProcessGroup = dist.new_group(
            list(ordered), timeout=timeout, backend=backend, use_local_synchronization=True
        )
    return made


@contextmanager
def _group_named(name: str) -> Iterator[None]:
    given = _DISTRIBUTED._process_group_name
    _DISTRIBUTED._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        _DISTRIBUTED._process_group_name = given


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long an operation of `group` may take."""
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    return backend.options._timeout


def _all_gather_into_tensor(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """On CPU, by gloo's gather of one tensor. Torch 2.13 takes that of several, which corrupts memory as soon as another
    collective is under way: malloc ends the process (without this project, too), and nothing says that numbers are spared."""
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    gathered: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(part, ranks, group, out=whole)
    return gathered


_FUNCTIONAL.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")
