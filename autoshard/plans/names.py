"""Fold names that differ in numbers only into one: `layers.0-31.w{1,3}`."""

from __future__ import annotations

import re
from collections.abc import Iterable


def pattern_of(name: str) -> str:
    """Return `"layers.#.w"`: the common form of names that differ in numbers only."""
    return re.sub(r"\d+", "#", name)


def fold_names(names: Iterable[str]) -> str:
    """Fold `["layers.0.w", "layers.1.w", "head"]` to `"layers.0-1.w, head"`."""
    patterns: dict[str, list[list[str]]] = {}
    for name in names:
        patterns.setdefault(pattern_of(name), []).append(re.split(r"(\d+)", name))
    return ", ".join(map(_fold, patterns.values()))


def _fold(split: Iterable[list[str]]) -> str:
    """Fold names of one pattern, each given as its words and numbers in turn."""
    columns = [list(dict.fromkeys(parts)) for parts in zip(*split, strict=True)]
    return "".join(column[0] if len(column) == 1 else _range(column) for column in columns)


def _range(numbers: list[str]) -> str:
    values = sorted(int(n) for n in numbers)
    if values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return "{" + ",".join(map(str, values)) + "}"


def fold_text(lines: Iterable[str]) -> list[str]:
    """Join lines that differ in numbers only into one, with their count."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(pattern_of(line), []).append(line)
    return [same[0] if len(same) == 1 else f"{same[0]} (and {len(same) - 1} alike)" for same in groups.values()]
