"""Importing autoshard and asking for help take little more CPU time than importing torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MORE = 0.5  # seconds of CPU time that it may take beyond torch's
RUNS = 2  # of each, of which the faster counts


def seconds(*command: str) -> float:
    """Return the CPU seconds of a process of Python."""
    found = []
    for _ in range(RUNS):
        before = os.times()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        found.append(after.children_user - before.children_user + after.children_system - before.children_system)
    return min(found)


@pytest.mark.slow
def test_importing_autoshard_and_help_cost_half_a_second_more_than_torch() -> None:
    torch = seconds("-c", "import torch")
    more = {" ".join(one): seconds(*one) - torch for one in (("-c", "import autoshard"), ("-m", "autoshard", "--help"))}
    assert {name: one for name, one in more.items() if one > MORE} == {}
