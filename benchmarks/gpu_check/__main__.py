"""Try on the GPUs of this machine all that was never run on one, and write a report: `python -m benchmarks.gpu_check`.

Each section runs in processes of its own, one for each device, so that a crash of one leaves the others: see `sections`. A
section that fails is in the report with its error, and the exit status is 1. `--device cpu` tries the same sections on two
processes without a GPU; words choose sections. Nothing is needed but torch for CUDA: the sections make their data.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu_check.sections import SECTIONS

LIMIT = 600  # s that a section may take
CPU_RANKS = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; by default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.md"), metavar="FILE")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("this process sees no CUDA device; --device cpu tries the sections without one")
    if unknown := [name for name in given.sections if name not in SECTIONS]:
        parser.error(f"unknown sections {', '.join(unknown)}; choose of {', '.join(SECTIONS)}")
    ranks = torch.cuda.device_count() if given.device == "cuda" else CPU_RANKS
    text, failed = [f"# {_machine(given.device, ranks)}, torch {torch.__version__}\n"], list[str]()
    for name in given.sections or SECTIONS:
        is_good, section = _run(name, given.device, ranks)
        failed += [] if is_good else [name]
        text.append(section)
        print(section, flush=True)
        given.output.write_text("\n".join(text))
    print(f"{given.output}: {', '.join(failed)} failed" if failed else f"{given.output}: every section ran")
    return 1 if failed else 0


def _machine(device: str, ranks: int) -> str:
    return f"{ranks} x {torch.cuda.get_device_name()}" if device == "cuda" else f"{ranks} processes on the CPU"


def _run(name: str, device: str, ranks: int) -> tuple[bool, str]:
    """Run one section; return whether it passed, and its part of the report."""
    launch = f"torch.distributed.run --standalone --nproc-per-node {ranks} -m benchmarks.gpu_check.sections {name} {device}"
    started = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, "-m", *launch.split()], capture_output=True, text=True, timeout=LIMIT)
        said, is_good = done.stdout if done.returncode == 0 else done.stdout + done.stderr, done.returncode == 0
    except subprocess.TimeoutExpired:
        said, is_good = f"stopped after {LIMIT} s", False
    state = "ran" if is_good else "FAILED"
    return is_good, f"## {name}: {state} in {time.perf_counter() - started:.0f} s\n\n```text\n{said.strip()}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
