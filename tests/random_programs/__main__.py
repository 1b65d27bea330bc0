"""Try random programs, and cut down those that fail.

    python -m tests.random_programs run --programs 10000 --seed 0 --results FILE   # goes on where the file ends
    python -m tests.random_programs run --compiled       # on one rank, by Inductor; show and shrink take it, too
    python -m tests.random_programs show SEED ...       # the programs of seeds, and how they end
    python -m tests.random_programs shrink SEED ...     # the least that fails in the same way
    python -m tests.random_programs summary FILE
    python -m tests.random_programs table FILE PARTS PAGE COMMIT   # add a file's results, made on a commit, to the parts
                                                         # that are kept, and write the table of all into a page
"""

from __future__ import annotations

import argparse
import json
import os
import pprint
import sys
import time
from pathlib import Path

from tests.random_programs.draw import draw
from tests.random_programs.evaluate import GOOD, Outcome
from tests.random_programs.parts import Parts, write_table
from tests.random_programs.program import Case
from tests.random_programs.results import read, result_of, summary
from tests.random_programs.shrink import shrunk
from tests.random_programs.workers import Worker, evaluate_seeds


def main() -> int:
    """Do what the command line says; the exit status."""
    given = _arguments()
    match given.command:
        case "run":
            return _run(given)
        case "show" | "shrink":
            for seed in given.seeds:
                _show(seed, smaller=given.command == "shrink", compiled=given.compiled)
        case "summary":
            print(summary(read(given.results)))
        case "table":
            parts = Parts.load(given.parts).with_results(read(given.results), given.commit)
            parts.save(given.parts)
            write_table(given.page, parts)
    return 0


def _run(given: argparse.Namespace) -> int:
    """Evaluate the seeds that the file has no result of."""
    done = {result["seed"] for result in read(given.results)}
    seeds = [seed for seed in range(given.seed, given.seed + given.programs) if seed not in done]
    started = time.monotonic()
    with given.results.open("a", encoding="utf-8") as file:
        for count, (seed, case, outcome, seconds) in enumerate(evaluate_seeds(seeds, given.workers, compiled=given.compiled), 1):
            file.write(json.dumps(result_of(seed, case, outcome, seconds)) + "\n")
            file.flush()
            if outcome.kind not in GOOD:
                print(f"seed {seed}: {outcome.kind}: {outcome.what}", flush=True)
            if count % 100 == 0:
                print(f"{count} of {len(seeds)}, {(time.monotonic() - started) / count:.1f} s each", flush=True)
    found = [result for result in read(given.results) if given.seed <= result["seed"] < given.seed + given.programs]
    print(summary(found))
    return int(any(result["kind"] not in GOOD for result in found))


def _show(seed: int, *, smaller: bool, compiled: bool) -> None:
    case, worker = draw(seed, compiled=compiled), Worker()
    try:
        outcome = _outcome(worker, case)
        if smaller and outcome.kind not in GOOD:
            same = (outcome.kind, outcome.what)
            case = shrunk(case, lambda one: (lambda it: (it.kind, it.what) == same)(_outcome(worker, one)))
            outcome = _outcome(worker, case)
    finally:
        worker.stop()
    print(f"seed {seed}: {outcome.kind}: {outcome.what}\n{case.program.source()}\n")
    pprint.pp(case, width=120)
    print(f"\n{outcome.detail}\n")


def _outcome(worker: Worker, case: Case) -> Outcome:
    worker.give(case)
    return worker.take()[1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="evaluate programs; a file keeps the results, and a second run goes on")
    run.add_argument("--programs", type=int, default=1000)
    run.add_argument("--seed", type=int, default=0, help="of the first program; the next ones follow it")
    run.add_argument("--results", type=Path, default=Path("fuzz.jsonl"))
    run.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    for one in (run, commands.add_parser("show"), commands.add_parser("shrink")):
        one.add_argument("--compiled", action="store_true", help="draw programs for one rank, and compile them by Inductor")
        if one is not run:
            one.add_argument("seeds", type=int, nargs="+")
    commands.add_parser("summary").add_argument("results", type=Path)
    table = commands.add_parser("table")
    table.add_argument("results", type=Path)
    table.add_argument("parts", type=Path)
    table.add_argument("page", type=Path)
    table.add_argument("commit")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
