"""Process groups: what functional collectives find under a name, and gloo's gathers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group
from torch.distributed import distributed_c10d

from passes._torch.patches import once, replaced

_LIBRARIES: Any = torch.library  # not typed
_KEPT: list[Any] = []  # libraries: what one put in ends with it
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
    """Return a group that its own ranks make, and no others have to.

    Torch names such a group by how many groups the process is in. Where one rank is in others besides, the names differ,
    and the ranks wait for each other until the timeout. Here it is how many groups of these very ranks were made.
    """
    ordered = tuple(sorted(ranks))
    number = _MADE[ordered]
    _MADE[ordered] += 1
    name = f"autoshard:{'_'.join(map(str, ordered))}:{number}"
    with replaced(distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name):
        made: dist.ProcessGroup = dist.new_group(
            list(ordered), timeout=timeout, backend=backend, use_local_synchronization=True
        )
    return made


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long an operation of `group` may take."""
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    return backend.options._timeout


def mend_gathers(device_type: str) -> None:
    """On CPU, let gathers go by gloo's gather of one tensor; called once groups on gloo are opened.

    Torch 2.13 takes that of several, which corrupts memory as soon as another collective is under way: malloc ends the
    process (without this project, too), and nothing says that numbers are spared. No release is known to be without this.
    """
    if device_type == "cpu":
        once("gloo's gather", _put_in_gather)


def _put_in_gather() -> None:
    library = _LIBRARIES.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")
    _KEPT.append(library)


def _all_gather_into_tensor(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    gathered: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(part, ranks, group, out=whole)
    return gathered
