"""Try autoshard on the models that people train: `python -m benchmarks.models`.

Each is built from the library's own classes in a small configuration, unmodified, and called as its documentation calls
it. It is planned for 4 ranks (dp=2,tp=2) and run on simulated ranks: losses, outputs, gradients and buffers have to equal
those of one device. A training step, an evaluation, and a training step on a batch of another shape are compared, with
`fsdp`, with `fsdp` x `megatron`, and with the default options. Prints a table; `--write` puts its rows into docs/models.md,
each as it is found; `--fast` takes the half of the models that `make test-models` runs, under `fsdp` x `megatron`, and
fails if one is not equal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.models.case import Case
from benchmarks.models.cases import CASES, rows_of
from benchmarks.models.measure import CALLS, RECIPES, Recipes, Row

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- made by python -m benchmarks.models --write -->\n", "<!-- end -->\n"
FAST: Recipes = {"fsdp x megatron": ("training", "evaluation")}
ALL: Recipes = dict.fromkeys(RECIPES, CALLS)  # the calls that are compared
HEADER = ("model", "recipe", "compared", "outcome", "seconds", "parameters", "FLOPs", "not cut in four")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="half of the models, one recipe; fails if one is not equal")
    parser.add_argument("-k", metavar="TEXT", default="", help="only models whose names have TEXT in them")
    parser.add_argument("--recipe", choices=list(RECIPES), help="only this recipe")
    parser.add_argument("--jobs", type=int, default=2, help="models that are tried at the same time")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    given = parser.parse_args()
    cases = [case for case in CASES if given.k.lower() in case.name.lower() and (case.is_fast or not given.fast)]
    recipes = FAST if given.fast else ALL
    if given.recipe:
        recipes = {given.recipe: recipes.get(given.recipe, CALLS)}
    rows = list[Row]()
    for found in _tried(cases, recipes, given.jobs):
        for row in found:
            print(" | ".join(_cells(row)), flush=True)
            rows.append(row)
        if given.write:
            _write(found)
    failed = [row for row in rows if not row.is_equal]
    print(f"{len(rows) - len(failed)} of {len(rows)} equal one device")
    if given.fast and failed:
        sys.exit(1)


def _tried(cases: list[Case], recipes: Recipes, jobs: int) -> Iterator[tuple[Row, ...]]:
    """Yield the rows of each case in order; those of a case that fails with an error that is not ours say so."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(rows_of, case.name, recipes) for case in cases]
        for case, future in zip(cases, futures, strict=True):
            error = future.exception()
            if error is None:
                yield future.result()
            else:
                yield tuple(Row(case.name, recipe, f"crash: {type(error).__name__}: {error}") for recipe in recipes)


def _cells(row: Row) -> tuple[str, ...]:
    begin = row.model, row.recipe, ", ".join(row.calls), row.outcome
    if not row.seconds:
        return *begin, "", "", "", ""
    return *begin, f"{row.seconds:.1f}", f"{row.parameters:.3f}", f"{row.flops:.3f}", row.whole


def _write(rows: tuple[Row, ...]) -> None:
    """Put rows into the table, in the order of `CASES`, in place of those of the same model and recipe."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    old = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table.splitlines()[2:]]
    found = {cells[:2]: cells for cells in (*old, *map(_cells, rows))}
    order = [(case.name, recipe) for case in CASES for recipe in RECIPES]
    ordered = sorted((cells for cells in found.values() if cells[:2] in order), key=lambda cells: order.index(cells[:2]))
    lines = [_line(HEADER), _line(("---",) * len(HEADER)), *map(_line, ordered)]
    PAGE.write_text("\n".join((before + BEGIN.rstrip(), *lines, END.rstrip())) + "\n" + after)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    main()
