"""Keep outcomes in a file, a line of JSON each, and summarize them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tests.random_programs.evaluate import EQUAL, GOOD, KINDS, Outcome
from tests.random_programs.program import Case

Result = dict[str, Any]


def result_of(seed: int, case: Case | None, outcome: Outcome, seconds: float) -> Result:
    """Return what is kept of a case: it is drawn again from its seed."""
    return {
        "seed": seed,
        "kind": outcome.kind,
        "what": outcome.what,
        "detail": "" if outcome.kind in GOOD else outcome.detail,
        "seconds": round(seconds, 2),
        "ops": outcome.ops,
        "productions": () if case is None else case.productions,
        "recipe": "?" if case is None else _recipe(case),
        "ranks": None if case is None else case.setting.ranks,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def read(path: Path) -> list[Result]:
    """Return the results of a file; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _recipe(case: Case) -> str:
    given = case.setting.recipe
    return given if isinstance(given, str) else "+".join(dict.fromkeys(str(one) for one in given.values()))


def summary(results: Iterable[Result]) -> str:
    """Return how many cases ended in which way, and each kind of failure with its seeds."""
    results = list(results)
    counts = Counter(one["kind"] for one in results)
    lines = [", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])]
    for (kind, what), seeds in sorted(_seeds(results).items(), key=lambda item: -len(item[1])):
        shown = " ".join(map(str, seeds[:8]))
        lines.append(f"  {len(seeds):5} {kind}: {what}   seeds {shown}")
    return "\n".join(lines)


def _seeds(results: list[Result]) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for one in results:
        if one["kind"] != EQUAL:
            found.setdefault((one["kind"], one["what"]), []).append(one["seed"])
    return found
