"""Run the sections of `benchmarks.gpu_check` on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_check import sections


def test_the_rows_of_attention_are_run_in_parts() -> None:
    said = list(sections.rules("cpu"))
    assert len(said) == 2 and all(line.endswith(".default: 2 rows") for line in said)


def test_a_kernel_that_does_not_run_in_parts_as_it_does_whole_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    half = sections._half
    monkeypatch.setattr(sections, "_half", lambda value, placement, rank: half(value, placement, 0))
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="result 0"):
        list(sections.rules("cpu"))
