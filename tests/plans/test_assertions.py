"""A plan is held to what a test expects of it; what is not so is said with the collectives that are to blame."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from autoshard import Mesh, Options, ShardingPlan, UserError, assert_plan, plan


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.up(x)), y)


@cache
def planned() -> ShardingPlan:
    with torch.device("meta"):
        model, x = Pair(), torch.empty(8, 64)
    return plan(model, Mesh("dp=2,tp=2", hardware="h100"), (x, x), options=Options(recipe="fsdp+megatron"))


def failure(**expected: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_plan(planned(), **expected)
    return str(caught.value)


def test_a_plan_as_expected() -> None:
    assert_plan(planned(), all_gathers=4, reduce_scatters=3, all_reduces=2, all_to_alls=0, fallbacks=0)
    assert_plan(planned(), all_gathers=3, axis="dp")
    assert_plan(planned(), step_ms=10, exposed_ms=10, peak_gb=1)


def test_counts_come_with_the_collectives() -> None:
    assert_expected_inline(failure(all_gathers=2, axis="tp", all_reduces=0, fallbacks=0), """\
the plan is not as expected:
all_gathers=2: there are 1 over tp
  %all_gather_2: all_gather over tp, 512 B, backward, exposed 8.70 us of 8.70 us
    insert_reshards: mm needs {dp:S(1), tp:R}      # test_assertions.py:25 down
all_reduces=0: there are 1 over tp
  %all_reduce_1: all_reduce over tp, 4 B, forward, exposed 12.1 us of 12.1 us
    insert_reshards: output needs {dp:R, tp:R}      # test_assertions.py:25""")


def test_limits_come_with_what_is_over_them() -> None:
    assert_expected_inline(failure(exposed_ms=0.01, peak_gb=0.00001), """\
the plan is not as expected:
exposed_ms=0.01: it is 0.05929
  %all_reduce_1: all_reduce over tp, 4 B, forward, exposed 12.1 us of 12.1 us
    insert_reshards: output needs {dp:R, tp:R}      # test_assertions.py:25
  %all_gather: all_gather over dp, 8.0 KiB, forward, exposed 8.73 us of 8.73 us
    seed: fsdp: gathered for use      # test_assertions.py:25 up
  %reduce_scatter_2: reduce_scatter over dp, 8.0 KiB, backward, exposed 8.73 us of 8.73 us
    insert_reshards: gradient needs {dp:S(0/2), tp:S(0)}      # test_assertions.py:25 up
  %reduce_scatter: reduce_scatter over tp, 512 B, forward, exposed 8.70 us of 8.70 us
    seed: megatron: row-parallel output      # test_assertions.py:25 down
  %all_gather_2: all_gather over tp, 512 B, backward, exposed 8.70 us of 8.70 us
    insert_reshards: mm needs {dp:S(1), tp:R}      # test_assertions.py:25 down
  %all_reduce: all_reduce over dp, 4 B, forward, exposed 7.85 us of 12.1 us
    insert_reshards: output needs {dp:R, tp:R}      # test_assertions.py:25
  and 2 more
peak_gb=1e-05: it is 9.422e-05
  optimizer 32.0 KiB, temporary 18.0 KiB, parameters 16.0 KiB, gathered 16.0 KiB, gradients 8.0 KiB, inputs 2.0 KiB, outputs 4 B""")  # noqa: E501


def test_a_golden_plan_comes_with_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    planned().save(path)
    assert_plan(planned(), golden=path)
    planned().replan(recipe="fsdp").save(path)
    text = failure(golden=path)
    assert text.startswith(f"the plan is not as expected:\ngolden={str(path)!r}: it changed; to accept that, plan.save(")
    assert "    recipe  fsdp       -> fsdp+megatron" in text


def test_a_limit_on_what_was_not_predicted() -> None:
    with pytest.raises(UserError) as caught:
        assert_plan(replace(planned(), cost=None), peak_gb=1)
    assert str(caught.value) == (
        "assert_plan(peak_gb=1): nothing was predicted for this plan; make it with autoshard.plan(...)"
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"plan": "plan.json"}, "plan='plan.json'): give a plan; ShardingPlan.load(path) reads a saved one"),
        ({"fallbacks": "0"}, "fallbacks='0'): give how many there are, a whole number of 0 or more"),
        ({"all_gathers": -1}, "all_gathers=-1): give how many there are, a whole number of 0 or more"),
        ({"peak_gb": "1"}, "peak_gb='1'): give a number"),
        ({"golden": 3}, "golden=3): give the path that a plan was saved to"),
    ],
)
def test_an_argument_of_another_type_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as caught:
        assert_plan(**{"plan": planned(), **given})
    assert str(caught.value) == f"assert_plan({text}"
