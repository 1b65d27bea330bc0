"""Keep outcomes in a file, a line of JSON each, and say what they come to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tests.random_programs.evaluate import EQUAL, GOOD, KINDS, REFUSED, Outcome
from tests.random_programs.productions import PRODUCTIONS
from tests.random_programs.program import Case

Result = dict[str, Any]
OPENING, CLOSING = "<!-- written by make fuzz-table -->", "<!-- end of what was written -->"


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


def write_table(path: Path, results: list[Result]) -> None:
    """Replace the table in a page of the documentation."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(OPENING)
    after = rest.partition(CLOSING)[2]
    path.write_text("\n".join([f"{before}{OPENING}", *_table(results), f"{CLOSING}{after}"]), encoding="utf-8")


def _table(results: list[Result]) -> Iterator[str]:
    seeds, days = [one["seed"] for one in results], sorted({one["date"] for one in results})
    versions = ", ".join(sorted({one["torch"] for one in results}))
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    yield f"{len(results)} cases, seeds {min(seeds)} to {max(seeds)}, torch {versions}, {when}:"
    yield ""
    yield "| recipe | cases | " + " | ".join(KINDS) + " |"
    yield "|---|" + "---|" * (len(KINDS) + 1)
    for name, group in _groups(results):
        counts = Counter(one["kind"] for one in group)
        yield f"| {name} | {len(group)} | " + " | ".join(str(counts[kind]) for kind in KINDS) + " |"
    yield ""
    refused = Counter(one["what"].partition(":")[0] for one in results if one["kind"] == REFUSED)
    yield "Refused, by error: " + (", ".join(f"{name} {count}" for name, count in refused.most_common()) or "none") + "."
    ops, drawn = {op for one in results for op in one["ops"]}, {name for one in results for name in one["productions"]}
    seconds = sum(one["seconds"] for one in results) / len(results)
    yield f"Ops covered: {len(ops)} overloads of ATen by {len(drawn & {*PRODUCTIONS})} of {len(PRODUCTIONS)} productions."
    yield f"A case takes {seconds:.1f} s of CPU in the mean."


def _groups(results: list[Result]) -> Iterator[tuple[str, list[Result]]]:
    yield "the search", [one for one in results if one["recipe"] == "auto"]
    yield "recipes and constraints", [one for one in results if one["recipe"] != "auto"]
    for mode in ("eager", "inductor"):
        yield f"on gloo ranks, {mode}", [one for one in results if one["ranks"] == mode]
    yield "all", results
