"""Guards see each write to a dict, and each tensor that begins or ceases to require a gradient."""

from __future__ import annotations

import torch

from passes._torch import alike_as_now, unchanged_since_now


def test_a_write_to_one_of_many_dicts_is_seen() -> None:
    dicts = [{"training": True} for _ in range(100)]
    unchanged = unchanged_since_now(dicts)
    assert unchanged()
    dicts[70]["training"] = False
    assert not unchanged()


def test_a_tensor_that_ceases_to_require_a_gradient_is_seen_with_and_without_gradients() -> None:
    tensors = [torch.ones(size, requires_grad=size % 2 == 0) for size in range(100)]
    alike = alike_as_now(tensors)
    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled):
            assert alike()
            for number in (70, 71):
                tensors[number].requires_grad_(number == 71)
                assert not alike()
                tensors[number].requires_grad_(number == 70)
            assert alike()


def test_tensors_are_not_said_to_be_alike_in_another_mode() -> None:
    alike = alike_as_now([torch.ones(2)])
    with torch.autocast("cpu"):
        assert not alike()
    assert alike()
