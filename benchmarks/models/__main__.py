"""Try autoshard on the models that people train: `python -m benchmarks.models`.

Each is built from the library's own classes in a small configuration, unmodified, and called as its documentation calls
it. It is planned for 4 ranks (dp=2,tp=2) with `fsdp`, with `fsdp` x `megatron` and with the default, and run on simulated
ranks: losses, outputs, gradients and buffers of a training step, an evaluation, and a training step on a batch of another
shape have to equal those of one device. Prints a table; `--write` puts it into docs/models.md; `--fast` takes the half of
the models that `make test-models` runs, under `fsdp` x `megatron`, and fails if one is not equal.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.models.case import Case
from benchmarks.models.cases import CASES, rows_of
from benchmarks.models.measure import RECIPES, Row

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- made by python -m benchmarks.models --write -->\n", "<!-- end -->\n"
FAST_RECIPES = ("fsdp x megatron",)
FAST_CALLS = ("training", "evaluation")
ALL_CALLS = (*FAST_CALLS, "second shape")
HEADER = ("model", "recipe", "outcome", "seconds", "parameters", "FLOPs", "not cut in four")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="half of the models, one recipe; fails if one is not equal")
    parser.add_argument("-k", metavar="TEXT", default="", help="only models whose names have TEXT in them")
    parser.add_argument("--recipe", choices=list(RECIPES), help="only this recipe")
    parser.add_argument("--calls", nargs="+", choices=ALL_CALLS, help="only these calls")
    parser.add_argument("--jobs", type=int, default=2, help="models that are tried at the same time")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    given = parser.parse_args()
    cases = [case for case in CASES if given.k.lower() in case.name.lower() and (case.is_fast or not given.fast)]
    recipes = (given.recipe,) if given.recipe else FAST_RECIPES if given.fast else tuple(RECIPES)
    calls = tuple(given.calls or (FAST_CALLS if given.fast else ALL_CALLS))
    rows = list[Row]()
    for found in _tried(cases, recipes, calls, given.jobs):
        for row in found:
            print(" | ".join(_cells(row)), flush=True)
            rows.append(row)
    failed = [row for row in rows if not row.is_equal]
    print(f"{len(rows) - len(failed)} of {len(rows)} equal one device")
    if given.write:
        _write(rows)
    if given.fast and failed:
        sys.exit(1)


def _tried(cases: list[Case], recipes: tuple[str, ...], calls: tuple[str, ...], jobs: int) -> Iterator[tuple[Row, ...]]:
    """Yield the rows of each case in order; a case that fails with an error that is not ours is a row that says so."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(rows_of, case.name, recipes, calls) for case in cases]
        for case, future in zip(cases, futures, strict=True):
            error = future.exception()
            yield future.result() if error is None else (Row(case.name, "", f"crash: {type(error).__name__}: {error}"),)


def _cells(row: Row) -> tuple[str, ...]:
    if not row.seconds:
        return row.model, row.recipe, row.outcome, "", "", "", ""
    shares = f"{row.parameters:.3f}", f"{row.flops:.3f}"
    return row.model, row.recipe, row.outcome, f"{row.seconds:.1f}", *shares, row.whole


def _write(rows: list[Row]) -> None:
    lines = [_line(HEADER), _line(("---",) * len(HEADER)), *(_line(_cells(row)) for row in rows)]
    table = "\n".join((*lines, ""))
    text = re.sub(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda _: table, PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(text)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    main()
