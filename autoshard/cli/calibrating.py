"""Command `calibrate`: measure the figures of this machine, for `--hardware`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from autoshard.cli.output import check_output
from autoshard.measure.calibrate import calibrate, format_calibration
from passes.errors import UserError


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("calibrate", description=_calibrate.__doc__)
    parser.add_argument("--mesh", help="axes to send over, under torchrun: dp=2,tp=4 (one of all ranks)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    parser.add_argument("--quick", action="store_true", help="a few small sizes: seconds, and rough")
    parser.add_argument("-o", "--output", metavar="FILE.json", help="where to write the figures, for --hardware")
    parser.set_defaults(run=_calibrate)


def _calibrate(given: argparse.Namespace) -> None:
    """Measure products, memory, launches and, under torchrun, collectives: what presets say of other machines."""
    check_output(given.output)
    if given.output and Path(given.output).suffix != ".json":
        raise UserError(f"--hardware reads figures from a .json file; write them to {Path(given.output).with_suffix('.json')}")
    calibration = calibrate(given.mesh, device=given.device, is_quick=given.quick)
    if int(os.environ.get("RANK", "0")):
        return
    print(format_calibration(calibration))
    if given.output:
        Path(given.output).write_text(calibration.hardware.to_json() + "\n", encoding="utf-8")
