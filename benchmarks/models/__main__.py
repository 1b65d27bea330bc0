"""Try autoshard on the models that people train: `python -m benchmarks.models`.

Each is built from the library's own classes in a small configuration, unmodified, and called as its documentation calls
it. It is planned for 4 ranks (dp=2,tp=2) and run on simulated ranks: losses, outputs, gradients and buffers have to equal
those of one device. A training step, an evaluation, and a training step on a batch of another shape are compared, with
`fsdp`, with `fsdp` x `megatron`, and with the default options. Prints a table; `--write` puts its rows into docs/models.md,
each as it is found. `--real-ranks` trains and evaluates on four gloo processes instead, with `fsdp` x `megatron` unless
`--recipe` says another. `--fast` takes the half of the models that `make test-models` runs, under `fsdp` x `megatron`, and
fails if one is not equal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.models.case import Case
from benchmarks.models.cases import CASES, rows_of
from benchmarks.models.measure import CALLS, RECIPES, Recipes, Row
from benchmarks.models.real_ranks import RealRow, trained
from benchmarks.models.table import Cells, Table

FAST: Recipes = {"fsdp x megatron": ("training", "evaluation")}
ALL: Recipes = dict.fromkeys(RECIPES, CALLS)  # the calls that are compared
SIMULATED = Table(
    "python -m benchmarks.models --write",
    ("model", "recipe", "compared", "outcome", "seconds", "parameters", "FLOPs", "not cut in four"),
)
REAL = Table(
    "python -m benchmarks.models --real-ranks --write",
    ("model", "recipe", "outcome", "loss and gradients off by", "evaluation off by", "seconds"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="half of the models, one recipe; fails if one is not equal")
    parser.add_argument("-k", metavar="TEXT", default="", help="only models whose names have TEXT in them")
    parser.add_argument("--recipe", choices=list(RECIPES), help="only this recipe")
    parser.add_argument("--real-ranks", action="store_true", help="four gloo processes instead of simulated ranks")
    parser.add_argument("--jobs", type=int, default=2, help="models that are tried at the same time")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    given = parser.parse_args()
    cases = [case for case in CASES if given.k.lower() in case.name.lower() and (case.is_fast or not given.fast)]
    cases = [case for case in cases if case.is_installed()]
    if given.real_ranks:
        failed = _on_real_ranks(cases, given.recipe or "fsdp x megatron", writes=given.write)
    else:
        recipes = FAST if given.fast else ALL
        if given.recipe:
            recipes = {given.recipe: recipes.get(given.recipe, CALLS)}
        failed = _on_simulated_ranks(cases, recipes, given.jobs, writes=given.write)
    if given.fast and failed:
        sys.exit(1)


def _on_simulated_ranks(cases: list[Case], recipes: Recipes, jobs: int, *, writes: bool) -> bool:
    """Print a row for each model and recipe; return whether one is not equal."""
    rows = list[Row]()
    for found in _tried(cases, recipes, jobs):
        _tell(list(map(_cells, found)), SIMULATED, writes=writes)
        rows += found
    return _sum_up(rows)


def _on_real_ranks(cases: list[Case], recipe: str, *, writes: bool) -> bool:
    """Print a row for each model; return whether one is not equal."""
    rows = list[RealRow]()
    for case in cases:
        rows.append(trained(case, recipe))
        _tell([_real_cells(rows[-1])], REAL, writes=writes)
    return _sum_up(rows)


def _tell(rows: list[Cells], table: Table, *, writes: bool) -> None:
    for cells in rows:
        print(" | ".join(cells), flush=True)
    if writes:
        table.write(rows, [(case.name, recipe) for case in CASES for recipe in RECIPES])


def _sum_up(rows: Sequence[Row | RealRow]) -> bool:
    equal = sum(row.is_equal for row in rows)
    print(f"{equal} of {len(rows)} equal one device")
    return equal < len(rows)


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


def _real_cells(row: RealRow) -> Cells:
    begin = row.model, row.recipe, row.outcome
    if not row.seconds:
        return *begin, "", "", ""
    return *begin, f"{row.training:.1e}", f"{row.evaluation:.1e}", f"{row.seconds:.1f}"


def _cells(row: Row) -> Cells:
    begin = row.model, row.recipe, ", ".join(row.calls), row.outcome
    if not row.seconds:
        return *begin, "", "", "", ""
    return *begin, f"{row.seconds:.1f}", f"{row.parameters:.3f}", f"{row.flops:.3f}", row.whole


if __name__ == "__main__":
    main()
