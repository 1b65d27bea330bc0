"""Digests of plans, to hold refactorings against.

    python -m tests.digests --write FILE [CASE ...]      # by name, or -k SUBSTRING
    python -m tests.digests --compare FILE [CASE ...]    # exit status 1 where anything differs
    python -m tests.digests --texts FOLDER [CASE ...]    # what is digested, a file per kind, for diff -r
    python -m tests.digests --list

With --fast, cases that take longest are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.digests.cases import CASES
from tests.digests.digest import Record, Texts, record_of
from tests.digests.making import make

FAILED = "failure"  # the only kind of a case that cannot be made


def main() -> int:
    """Do what the command line says; the exit status."""
    given = _arguments()
    torch.set_num_threads(1)
    names = _chosen(given.cases, given.keyword, fast=given.fast)
    if given.list:
        print("\n".join(names))
        return 0
    if given.texts is not None:
        for name, texts, _ in _made(names):
            _write_texts(given.texts / name, texts)
        return 0
    if given.write is not None:
        return _write(given.write, names)
    return _compare(json.loads(given.compare.read_text()), names)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="write the digests of all cases, or of those named")
    what.add_argument("--compare", type=Path, metavar="FILE", help="say what differs from a file; exit status 1 if anything")
    what.add_argument("--texts", type=Path, metavar="FOLDER", help="write what is digested, to be compared by diff -r")
    what.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("-k", dest="keyword", default="", metavar="SUBSTRING", help="those whose names have it alone")
    parser.add_argument("--fast", action="store_true", help="leave the slow cases out")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    return parser.parse_args()


def _chosen(cases: list[str], keyword: str, *, fast: bool) -> list[str]:
    if unknown := [name for name in cases if name not in CASES]:
        sys.exit(f"no case {', '.join(unknown)}; --list names them")
    return [name for name in cases or CASES if keyword in name and not (fast and CASES[name].slow)]


def _made(names: list[str]) -> Iterator[tuple[str, Texts, Record]]:
    """Return each case's texts and figures; how long it took is printed."""
    for name in names:
        started, used = time.perf_counter(), time.process_time()
        try:
            texts, figures = make(CASES[name])
        except Exception as error:
            traceback.print_exc()
            texts, figures = {}, {FAILED: f"{type(error).__name__}: {error}"}
        took, cpu = time.perf_counter() - started, time.process_time() - used
        print(f"{name}: {took:.1f} s ({cpu:.1f} s of the processor)", file=sys.stderr, flush=True)
        yield name, texts, figures


def _write_texts(folder: Path, texts: Texts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, text in texts.items():
        (folder / f"{re.sub(r'[^-.a-zA-Z0-9]+', '-', kind)}.txt").write_text(text + "\n")


def _write(file: Path, names: list[str]) -> int:
    records = {name: record_of(texts, figures) for name, texts, figures in _made(names)}
    if failed := [name for name, record in records.items() if FAILED in record]:
        print(f"nothing is written: {', '.join(failed)} failed")
        return 1
    file.write_text(json.dumps({"torch": torch.__version__, "cases": records}, indent=1, sort_keys=True) + "\n")
    return 0


def _compare(file: Mapping[str, Any], names: list[str]) -> int:
    """Say what differs as it is found."""
    if file["torch"] != torch.__version__:
        print(f"written with torch {file['torch']}, compared with {torch.__version__}")
    count = 0
    for name, texts, figures in _made(names):
        for line in _differences(name, file["cases"].get(name), record_of(texts, figures)):
            count += 1
            print(line, flush=True)
    print(f"{count} differences" if count else f"all {len(names)} cases are equal")
    return 1 if count else 0


def _differences(name: str, before: Record | None, now: Record) -> Iterator[str]:
    if before is None:
        yield f"{name}: not in the file"
        return
    if FAILED in now:
        yield f"{name}: fails: {now[FAILED]}"
        return
    for kind in dict.fromkeys((*before, *now)):
        if kind not in now or kind not in before:
            yield f"{name}: {kind} is {'new' if kind in now else 'gone'}"
        elif before[kind] != now[kind]:
            is_digest = re.fullmatch(r"[0-9a-f]{16}", before[kind]) is not None
            yield f"{name}: {kind} differs" + ("" if is_digest else f": {now[kind]}, not {before[kind]}")


if __name__ == "__main__":
    sys.exit(main())
