"""Test that operators on whole tensors return whole tensors, and operators that also take a plain tensor return plain ones."""

from __future__ import annotations

import copy
import io
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard import Options, autoshard
from autoshard.runtime.whole_tensor import WholeTensor


def whole(*shape: int) -> torch.Tensor:
    return WholeTensor.of(torch.randn(*shape))


def test_operators_on_whole_tensors_are_whole() -> None:
    a, b = whole(3, 4), whole(3, 4)
    results = [a + b, a * 2, a[:, 0], a.detach(), torch.cat([a, b]), a.view(12), a @ b.T, a + torch.tensor(2.0)]
    assert all(type(one) is WholeTensor for one in results)
    assert all(type(one) is WholeTensor for one in a.chunk(3))


def test_an_operator_that_takes_a_plain_tensor_returns_one() -> None:
    a, plain = whole(3, 4), torch.randn(3, 4)
    assert type(a + plain) is type(plain + a) is type(torch.cat([plain, a])) is torch.Tensor
    assert torch.equal(a + plain, a.plain() + plain)  # type: ignore[attr-defined]


def test_a_number_has_no_mark() -> None:
    assert type(whole(3).sum()) is torch.Tensor and type(WholeTensor.of(torch.ones(()))) is torch.Tensor


def test_a_number_with_a_gradient_may_be_divided_by_a_count_of_what_shard_returned(one_rank: DeviceMesh) -> None:
    x, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([0, -100, 2])
    counted = DTensor.from_local(labels, one_rank, [Replicate()])

    def gradient(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        total += torch.nn.functional.cross_entropy(outputs, labels, reduction="sum") / (labels != -100).sum()
        total += outputs.square().sum() * 0.5 / (labels != -100).sum().clamp(min=1)
        assert f"{total:.3f}" == f"{total.item():.3f}" and type(total.detach()) is torch.Tensor
        return torch.autograd.grad(total, x)[0]

    found = gradient(WholeTensor.of(x.sin()), counted)
    torch.testing.assert_close(found, gradient(x.sin(), labels), rtol=0, atol=0)


def test_numbers_do_not_make_a_tensor_whole() -> None:
    number = WholeTensor.of(torch.ones(3, requires_grad=True) * 2).sum()
    assert type(number) is WholeTensor
    assert type(torch.stack([number, torch.ones(())])) is type(number.expand(3)) is torch.Tensor
    assert type(number + torch.ones(3)) is type(number.detach() + torch.ones(3)) is torch.Tensor


def test_gradients_are_plain() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (WholeTensor.of(x * 2)[:, 0].square().sum()).backward()
    assert x.grad is not None and type(x.grad) is torch.Tensor
    assert torch.equal(x.grad[:, 0], 8 * x.detach()[:, 0]) and not x.grad[:, 1:].any()


def test_it_is_used_like_any_tensor() -> None:
    a = whole(3)
    assert a.tolist() == [float(one) for one in a] and a.numpy().shape == (3,) and a.shape == (3,)
    assert type(a.shape) is type(a.size()) is torch.Size and a.shape.numel() == 3
    assert torch.nn.functional.cross_entropy(whole(3, 5), torch.tensor([0, 1, 2])).dim() == 0
    torch.testing.assert_close(a, a.plain())  # type: ignore[attr-defined]
    compiled = torch.compile(lambda t: t.sin() + 1, backend="eager")
    assert torch.equal(compiled(a), a.sin() + 1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_loss_takes_it(one_rank: DeviceMesh, backend: str) -> None:
    autoshard(torch.nn.Identity(), one_rank, (torch.ones(2, 2),), options=Options(compile="eager"))
    x, other = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, labels) + outputs.logsumexp(1).mean()

    compiled = torch.compile(loss, backend=backend)
    (expected,) = torch.autograd.grad(loss(x.sin(), other), x)
    for outputs in (WholeTensor.of(x.sin()), x.sin()):
        (gradient,) = torch.autograd.grad(compiled(outputs, other), x)
        torch.testing.assert_close(gradient, expected)
    both = torch.compile(lambda a, b: a + b, backend=backend)
    assert type(both(whole(3), whole(3))) is WholeTensor and type(both(whole(3), torch.ones(3))) is torch.Tensor


def test_its_copy_is_whole_too() -> None:
    a = whole(3)
    (b,) = copy.deepcopy([a])
    assert type(b) is WholeTensor and torch.equal(a, b) and b.data_ptr() != a.data_ptr()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(WholeTensor.of(torch.ones(3, requires_grad=True) * 2))


def test_it_is_saved_as_a_plain_tensor() -> None:
    a, file = whole(3), io.BytesIO()
    torch.save({"a": a}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["a"]
    assert type(loaded) is torch.Tensor and torch.equal(loaded, a)


class Marks(torch.autograd.Function):
    """Note of what class a sum is that a backward makes of a whole tensor, as a checkpoint does that calls a model again."""

    made: ClassVar[list[type]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Marks.made.append(type(whole(3) + 1))
        return gradient


def test_what_a_backward_computes_again_is_whole() -> None:
    Marks.made.clear()
    x = torch.randn(3, requires_grad=True)
    loss = Marks.apply(WholeTensor.of(x * 2)).sum()
    assert type(loss) is WholeTensor
    loss.backward(retain_graph=True)
    torch.autograd.backward([loss], retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.tolist() == [2.0] * 3 and x.grad is not None and x.grad.tolist() == [4.0] * 3
    assert Marks.made == [WholeTensor] * 3
