"""Planning needs nothing that an earlier call in the same process happened to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

POOLED = """
import torch
from torch import nn
from autoshard import plan

plan(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), "dp=2", (torch.randn(4, 3, 8, 8),))
"""


@pytest.mark.slow
def test_max_pooling_is_planned_first() -> None:
    subprocess.run([sys.executable, "-c", POOLED], check=True)
