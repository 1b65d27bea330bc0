"""Process groups: what functional collectives find under a name."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group


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


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long an operation of `group` may take."""
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    return backend.options._timeout
