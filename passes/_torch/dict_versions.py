"""Dynamo's guards on the versions of dicts: thousands are checked in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._C._dynamo.guards import RootGuardManager
from torch._dynamo.guards import GuardManagerType


def unchanged_since_now(dicts: Sequence[Mapping[Any, Any]]) -> Callable[[], bool]:
    """Return a function that says whether none of `dicts` was written to since now."""
    held = tuple(dicts)
    root = RootGuardManager()
    for number, one in enumerate(held):
        item = root.tuple_getitem_manager(number, "", one, GuardManagerType.GUARD_MANAGER)
        item.add_dict_version_guard(one, [""], None)

    def check() -> bool:
        return bool(root.check(held))

    return check
