"""Process groups: their names for functional collectives, and a workaround for gloo's all-gather."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    TCPStore,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed import distributed_c10d

from passes._torch.patches import once, replaced

_LIBRARIES: Any = torch.library  # not typed
_KEPT: list[Any] = []  # libraries: an implementation is removed with its library
_MADE: Counter[tuple[int, ...]] = Counter()  # groups that this process has made, by their ranks


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let functional collectives find `group` under `name`."""
    _register_process_group(name, group)  # type: ignore[arg-type]


def unregister_group(name: str) -> None:
    _unregister_process_group(name)  # type: ignore[arg-type]


def registered_group(name: str) -> dist.ProcessGroup | None:
    """Return the group that functional collectives find under `name`; None: there is none."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return None


def new_group(ranks: Sequence[int], *, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """Return a group that only its own ranks have to create.

    Torch names such a group by the number of groups that the process is in. If one rank is in more groups than another,
    the names differ, and the ranks wait for each other until the timeout. Here the name counts the groups of these
    ranks only.
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
    """Return the timeout of the operations of `group`."""
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    return backend.options._timeout


@contextmanager
def during_timeout(groups: Iterable[dist.ProcessGroup], seconds: float) -> Iterator[None]:
    """Let collectives that are issued inside time out after so many seconds."""
    before = [(group, group_timeout(group)) for group in groups]
    for group, _ in before:
        group.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        for group, timeout in before:
            group.set_timeout(timeout)


def watch_store(prefix: str) -> Any:
    """Return the store of the process group, under a prefix and over a connection of its own: a wait on one blocks all
    others who use it.
    """
    store: Any = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore(prefix, store.clone())


def store_address() -> tuple[str, int] | None:
    """Return where the process group's store listens; None if that is no server."""
    store: Any = distributed_c10d._get_default_store()
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def mend_gathers(device_type: str) -> None:
    """Replace the all-gather on CPU by gloo's gather of one tensor; called when groups on gloo are opened.

    Torch 2.13 uses gloo's gather of several tensors, which corrupts memory as soon as another collective is under way
    (without this project, too): malloc aborts the process, and results may be wrong. No release is known to fix it.
    """
    if device_type == "cpu":
        once("gloo's gather", _put_in_gather)


def _put_in_gather() -> None:
    library = _LIBRARIES.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CPU")
    _KEPT.append(library)


def _all_gather_into_tensor(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Gather parts; gloo sends no complex numbers, as `DTensor.full_tensor` asks for, so that they are sent as pairs."""
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    sent, out = (torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in (part, whole))
    torch.ops._c10d_functional.all_gather_into_tensor_out(sent, ranks, group, out=out)
    return whole
