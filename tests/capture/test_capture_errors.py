"""What cannot be captured, and calls that do not fit a capture, are refused in words that say what to change.

Each model states its message as its docstring, with the user's line as `<line>`.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
import threading
import traceback
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributions import Distribution, MultivariateNormal
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoshard.capture.capture import capture
from passes._torch.supported import release
from passes.errors import CaptureError, InputError

LOCK = threading.Lock()
SEEN: list[int] = []
ELSEWHERE = torch.ones(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.calls = 0
        self.log: list[Tensor] = []


class Branches(Model):
    """the model branches on the value of a tensor, but a graph takes one path for all values; compute both sides and
    choose with torch.where(condition, a, b) <line>"""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # <line>
            return self.layer(x)
        return x


class Mixes(Model):
    """the model multiplies f32 by f64, which no device does; cast one, such as x.to(weight.dtype) (with mixed precision,
    parameters and inputs come in its param_dtype) <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.double())  # <line>


class Loops(Model):
    """the model branches on the value of a tensor, but a graph takes one path for all values; compute both sides and
    choose with torch.where(condition, a, b) <line>"""

    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:  # <line>
            x = x / 2
        return self.layer(x)


class Decides(Model):
    """the model decides by the value of a tensor, but a graph takes one path for all values; compute both sides and
    choose with torch.where(condition, a, b) <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if bool((x > 0).any()) else x  # <line>


class DecidesBySize(Model):
    """the model decides by the size of a tensor whose shape depends on values (such as x[mask], nonzero() or unique()), but the
    shapes of a graph are fixed; where it is made, keep all elements and blank out with torch.where, a product with the mask, or
    masked_fill <line>"""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        return self.layer(kept) if len(kept) > 1 else x  # <line>


class ReadsItem(Model):
    """the model reads a number out of a tensor (item(), tolist(), int(), float()), but a graph is built before any
    number is known; keep it a tensor <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * x.sum().item()  # <line>


class ReadsList(Model):
    """the model reads a number out of a tensor (item(), tolist(), int(), float()), but a graph is built before any
    number is known; keep it a tensor <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * x.tolist()[0][0]  # <line>


class ReturnsItem(Model):
    """the model reads a number out of a tensor (item(), tolist(), int(), float()), but a graph is built before any
    number is known; keep it a tensor <line>"""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return self.layer(x), x.sum().item()  # <line>


class ReturnsInteger(Model):
    """the model reads a number out of a tensor (item(), tolist(), int(), float()), but a graph is built before any
    number is known; keep it a tensor <line>"""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.layer(x), int(x.sum())  # <line>


class Compares(Model):
    """a function of torch reads a value out of a tensor here (equal), but a graph is built before any value is known;
    write it with functions that return tensors <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.equal(x, x.round())  # <line>


class MakesGenerator(Model):
    """the model makes a torch.Generator while it runs, but a program draws all numbers from one; leave out
    generator=..., or give the numbers as an argument or a buffer <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.rand(4, generator=torch.Generator())  # <line>


class GivesText(Model):
    """the model fails for these arguments, as it would on one device: linear(): argument 'input' (position 1) must be
    Tensor, not str <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear("text", self.layer.weight) + x  # <line>


class HoldsScript(Model):
    """scripted is a ScriptModule, which torch.jit made, and has no Python code to be captured; give the nn.Module that it
    was made from"""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.scripted(x)


class HoldsParallel(Model):
    """parallel is wrapped in DataParallel, which joins gradients, as the sharded model does itself; give parallel.module in place
    of parallel"""

    def __init__(self) -> None:
        super().__init__()
        self.parallel = nn.DataParallel(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.parallel(x)


class Sends(Model):
    """the model sends values between ranks (all_reduce), but it computes as on one device: each value is that of all ranks
    together, and messages are autoshard's to place; remove the call (a sum or mean over the batch is one over all of it)
    <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(self.layer(x), "sum", "data")  # <line>


class SendsGradients(Model):
    """the model sends values between ranks (all_reduce), but it computes as on one device: each value is that of all ranks
    together, and messages are autoshard's to place; remove the call (a sum or mean over the batch is one over all of it)
    <line>"""

    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return all_reduce(gradient, "sum", "data")  # <line>

    def forward(self, x: Tensor) -> Tensor:
        return self.Total.apply(self.layer(x))


class IndexesByMask(Model):
    """the model makes a tensor whose shape depends on values, but the shapes of a graph are fixed; keep all elements
    and blank out with torch.where, a product with the mask, or masked_fill <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[x > 0]  # <line>


class ReadsSelectedRows(Model):
    """the model selects rows by a mask (x[mask]), and reads them here by what is not known to compute each row by itself, but the
    shapes of a graph are fixed; keep all rows and blank out with torch.where, a product with the mask, or masked_fill <line>"""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(x)[x[:, 0] > 0]
        return rows.std()  # <line>


class Unique(Model):
    """the model makes a tensor whose shape depends on values, but the shapes of a graph are fixed; keep all elements
    and blank out with torch.where, a product with the mask, or masked_fill <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() + torch.unique(x).sum()  # <line>


class Seeds(Model):
    """the model calls manual_seed while it runs, but a graph has tensor operations only; remove the call, or make it
    only where torch.compiler.is_compiling() is False <line> <without dynamo> it draws numbers outside of tensors, or seeds
    them (manual_seed)"""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)  # <line>
        return self.layer(x) + torch.rand(4)


class Draws(Model):
    """the model draws a number with Python's random module, but a graph would have the same number in every call; draw
    it with torch.rand(()) or torch.randint <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.random()  # <line>


class DrawsUniformly(Model):
    """the model draws a number with Python's random module, but a graph would have the same number in every call; draw
    it with torch.rand(()) or torch.randint <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.uniform(0.0, 2.0)  # <line>


class DrawsAnInteger(Model):
    """the model draws a number with Python's random module, but a graph would have the same number in every call; draw
    it with torch.rand(()) or torch.randint <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.randint(1, 3)  # <line>


class Raises(Model):
    """the model raises ValueError('a batch of 2') for these arguments; call it with arguments that it accepts <line>"""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"a batch of {x.shape[0]}")  # <line>


class Mismatches(Model):
    """the model fails for these arguments, as it would on one device: a and b must have same reduction dim, but got
    [4, 2] X [4, 4]. <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.t())  # <line>


class Differentiates(Model):
    """the model calls backward() in its forward, but the backward is derived from the forward's graph; move it into the
    training step, or use torch.autograd.grad <line>"""

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).sum()
        loss.backward()  # <line>
        return loss


class DifferentiatesByItsOwnLeaf(Model):
    """the model differentiates by a value that needs no gradient, or that requires_grad_() marks inside of the model, which a
    graph leaves out; use torch.func.grad, or differentiate by an argument that is given with requires_grad=True <line>"""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)[0]  # <line>


class HasBackwardHook(Model):
    """a module of the model has a backward hook, but the backward is part of the graph; remove the hook and write what
    it does as a torch.autograd.Function <line>"""

    def __init__(self) -> None:
        super().__init__()
        self.layer.register_full_backward_hook(lambda module, inputs, outputs: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # <line>


class AssignsBuffer(Model):
    """the model gives a buffer another shape or dtype while it runs, but a graph has the same for all calls; register it
    with the shape and dtype that it gets <line>"""

    average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.average = x.mean(0, keepdim=True)  # <line>
        return self.layer(x)


class Counts(Model):
    """the model changes calls and computes with it, but a graph has one value for all calls; keep it in a buffer that is
    updated in place, or pass it as an argument <line>"""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # <line>
        return self.layer(x) * self.calls


class Logs(Model):
    """the model changes the list log and computes with it, but a graph has one value for all calls; begin each call with an empty
    one (self.log.clear()), or keep the values in a buffer that is updated in place <line>"""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.log.append(y)  # <line>
        return y * len(self.log)


class LooksUpSparsely(Model):
    """the model asks for the sparse gradient of an embedding, but gradients of a sharded model are dense; make it with
    sparse=False, and train it with the optimizer of the other parameters <line>"""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.long().clamp(0, 2))  # <line>


class MakesSparse(Model):
    """sparse_coo_tensor makes a sparse tensor, but a program computes on dense tensors; make it dense with .to_dense(), or keep
    its indices and values, and multiply by index_select and index_add <line>"""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(3).expand(2, 3)
        return torch.sparse.mm(torch.sparse_coo_tensor(places, torch.ones(3), (3, 3)), self.layer(x))  # <line>


class TurnsSparse(Model):
    """to_sparse makes a sparse tensor, but a program computes on dense tensors; make it dense with .to_dense(), or keep its
    indices and values, and multiply by index_select and index_add <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).to_sparse()  # <line>


class MarginOfLabels(Model):
    """torch computes another loss when it traces multilabel_margin_loss with targets that end at -1; write it with gather and a
    mask, or use multilabel_soft_margin_loss <line>"""

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.zeros_like(x, dtype=torch.long) - 1
        return nn.functional.multilabel_margin_loss(x, labels)  # <line>


class LogsGlobally(Model):
    """the model changes SEEN while it runs, but a graph computes tensors and changes nothing else; return the value, or
    keep it in a buffer that is updated in place <line>"""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.shape[0])  # <line>
        return self.layer(x)


class HookKeepsItsOutput(Model):
    """the forward hook of layer changes kept, which is outside of the model, but a graph computes tensors and changes nothing
    else; keep the value on the module: module.kept = value <line>"""

    def __init__(self) -> None:
        super().__init__()
        kept: dict[str, Tensor] = {}

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            kept["output"] = output  # <line>

        self.layer.register_forward_hook(lambda module, args, output: None)
        self.layer.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class HookBindsAVariable(Model):
    """the forward pre-hook of the model changes last, which is outside of the model, but a graph computes tensors and changes
    nothing else; keep the value on the module: module.kept = value <line>"""

    def __init__(self) -> None:
        super().__init__()
        last: Any = None

        def hook(module: nn.Module, args: Any) -> None:
            nonlocal last
            last = args[0]  # <line>

        self.register_forward_pre_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class HookIsAMethod(Model):
    """the forward hook of layer changes a Keeper, which is outside of the model, but a graph computes tensors and changes nothing
    else; keep the value on the module: module.kept = value <line>"""

    def __init__(self) -> None:
        super().__init__()

        class Keeper:
            def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
                self.output = output  # <line>

        self.layer.register_forward_hook(Keeper().keep)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class ForwardKeepsItsOutput(Model):
    """layer.forward changes kept, which is outside of the model, but a graph computes tensors and changes nothing else; keep the
    value on the module: module.kept = value <line>"""

    def __init__(self) -> None:
        super().__init__()
        forward, kept = self.layer.forward, list[Tensor]()

        def keeping(x: Tensor) -> Tensor:
            kept.append(x)  # <line>
            return forward(x)

        self.layer.forward = keeping  # type: ignore[method-assign, assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class ChangesInput(Model):
    """the model changes its input x in place, which no other rank would see; work on a copy: x = x.clone() <line>"""

    def forward(self, x: Tensor) -> Tensor:
        x[0].mul_(2)  # <line>
        return self.layer(x)


class ChangesInputInTuple(Model):
    """the model changes its input tensors.0 in place, which no other rank would see; work on a copy, made with clone()
    <line>"""

    def forward(self, *tensors: Tensor) -> Tensor:
        tensors[0].mul_(2)  # <line>
        return self.layer(tensors[0])


class ChangesItsClass(Model):
    """the model changes type(self).masks while it runs, but a graph computes tensors and changes nothing else; return the value,
    or keep it in a buffer that is updated in place <line>"""

    masks: dict[int, Tensor] = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        if 4 not in self.masks:
            self.masks[4] = torch.ones(4)  # <line>
        return self.layer(x) * self.masks[4]


class ChangesParameter(Model):
    """the model changes its parameter layer.weight in the forward; change parameters outside of it, in the optimizer or
    after the step <line>"""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-1, 1)  # <line>
        return self.layer(x)


class LimitsNorms(Model):
    """max_norm makes an embedding change its parameter layer.weight in the forward; leave max_norm out, and limit the norms after
    the step: weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1)) <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x.long().clamp(0, 1), self.layer.weight, max_norm=0.5)  # <line>


class CountsValues(Model):
    """the length of what torch.bincount returns depends on values, but the shapes of a graph are fixed; say with minlength=...
    how many values there are at most <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() + torch.bincount(x[0].long().abs()).sum()  # <line>


class CatchesAnError(Model):
    """the model catches an error of torch here (shape '[3, -1]' is invalid for input of size 8), but a graph has tensor
    operations only; decide by the shapes and dtypes of tensors instead, before the call <line>"""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.layer(x).view(3, -1)  # <line>
        except RuntimeError:
            return self.layer(x)


class CountsWhatHasAGradient(Model):
    """the model raises NotImplementedError('torch does not differentiate bincount: use zeros(length).scatter_add(0, x,
    weights)') for these arguments; call it with arguments that it accepts <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return torch.bincount(x[0].long().abs(), weights=self.layer(x)[0], minlength=9).sum()  # <line>


class Packs(Model):
    """the model packs sequences (pack_padded_sequence), but the shapes of a graph are fixed; give the layer the padded batch,
    and take each sequence's result at its length <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return nn.utils.rnn.pack_padded_sequence(self.layer(x)[None], torch.tensor([2]), batch_first=True).data  # <line>


class AssignsData(Model):
    """the model assigns to the .data of a parameter or buffer in its forward; change parameters outside of it, in the
    optimizer or after the step, and a buffer in place: self.buffer.copy_(...)"""

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data = self.layer.weight.data * 0.5
        return self.layer(x)


@torch.library.custom_op("autoshard_tests::doubled_in_place", mutates_args={"x"})
def doubled_in_place(x: Tensor) -> None:
    x.mul_(2)


class ChangesArgument(Model):
    """autoshard_tests.doubled_in_place.default changes an argument in place, which a graph cannot hold of an operator that is
    not torch's own; let it return a new tensor <line>"""

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x).clone()
        torch.ops.autoshard_tests.doubled_in_place(found)  # <line>
        return found.detach()


class ChangesAttribute(Model):
    """the model changes total, which is neither buffer nor parameter; make it a buffer: self.register_buffer('total',
    ...) <line>"""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))  # <line>
        return self.layer(x)


class BufferWithGradient(Model):
    """the model gives its buffer average a value that carries a gradient, so that the next step would reach into this
    one; detach the value first <line>"""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.average.mul_(0.9).add_(y.mean(0))  # <line>
        return y


class HidesParameters(Model):
    """the model reads layers[0].weight, a tensor that needs a gradient and is no parameter of it; register it with
    nn.Parameter, and modules in lists with nn.ModuleList <line>"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)  # <line>


def _enclosing() -> type[Model]:
    outer = nn.Linear(4, 4)

    class EnclosesParameter(Model):
        """the model reads _enclosing.<locals>.EnclosesParameter.outer.weight, a tensor that needs a gradient and is
        no parameter of it; register it with nn.Parameter, and modules in lists with nn.ModuleList <line>"""

        def forward(self, x: Tensor) -> Tensor:
            return outer(self.layer(x))  # <line>

    return EnclosesParameter


EnclosesParameter = _enclosing()


class HidesParameter(Model):
    """the model reads weight, a tensor that needs a gradient and is no parameter of it; register it with nn.Parameter,
    and modules in lists with nn.ModuleList <line>"""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(4, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.weight  # <line>


class KeepsGraph(Model):
    """cond keeps a graph of its own, which cannot be sharded; write it with plain tensor operations <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))  # <line>


class Result:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class KeysCache(Result):
    """Stands for what a library hands from one token to the next."""


class ReturnsObject(Model):
    """the model returns a Result at 0, and tensors inside it would be lost; return tensors in tuples, lists, dicts or
    dataclasses, or register the class with torch.utils._pytree.register_pytree_node"""

    def forward(self, x: Tensor) -> tuple[Result, int]:
        return Result(self.layer(x)), 1


class ReturnsGlobal(Model):
    """the model returns at 1 a tensor that it neither computes nor is given; make it a buffer or an argument, or do not
    return it"""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), ELSEWHERE


class ReturnsNothing(Model):
    """the model returns no tensor; return what the training step needs, such as the loss"""

    def forward(self, x: Tensor) -> None:
        self.layer(x)


class HoldsLock(Model):
    """HoldsLock cannot be copied, and a copy without data is what is traced: cannot pickle '_thread.lock' object; keep
    what cannot be copied (locks, files, process groups) out of the module's attributes"""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class IsLazy(Model):
    """parameter layer.weight has no shape yet, as its module is lazy; run the module once on one device before"""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class NamedAsGradient(Model):
    """parameter input:x is named as plans name the gradient of an input; rename it, without 'input:'"""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("input:x", nn.Parameter(torch.ones(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.get_parameter("input:x")


def keep_products() -> Any:
    keeps, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(lambda _, op, *args, **kwargs: keeps if "mm" in str(op) else again)


class KeepsSome(Model):
    """the model says by context_fn of torch.utils.checkpoint which values to keep, which cannot be followed; leave
    context_fn out, or checkpoint() out and choose by Options(recompute=...) <line>"""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False, context_fn=keep_products)  # <line>


class DropsBetweenRecurrentLayers(Model):
    """torch loses the dropout between the layers of gru (dropout=0.3) when it traces a model; set dropout=0, or use
    one-layer modules with nn.Dropout between them <line>"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(4, 4, num_layers=2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]  # <line>


def models() -> list[type[Model]]:
    return [value for value in globals().values() if inspect.isclass(value) and issubclass(value, Model)][1:]


def expected_message(model: type[Model]) -> str:
    """Return the docstring on one line, `<line>` being where the class says so."""
    lines, first = inspect.getsourcelines(model)
    message = re.sub(r"\s+", " ", model.__doc__ or "")
    message = message.replace(" <without dynamo>", "\nwithout dynamo, torch's tracer, it cannot be captured either:")
    for number, line in enumerate(lines, first):
        if line.rstrip().endswith("# <line>"):
            return message.replace(" <line>", f"\n  {__file__}:{number}: {line.strip()}")
    assert "<line>" not in message
    return message


@pytest.mark.parametrize("model", models())
def test_what_cannot_be_captured_says_what_to_change(model: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)  # torch.compile, which one calls, changes it
    with pytest.raises(CaptureError) as raised:
        capture(model(), (torch.ones(2, 4),), training=True)
    assert str(raised.value) == expected_message(model)


DROPS_LAYERS = """
import torch

class Drops(torch.nn.Linear):
    def forward(self, x):
        skip_the_layer = torch.rand([]) < 0.1
        return x if skip_the_layer else super().forward(x)
"""


class Correlated(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return MultivariateNormal(super().forward(x), torch.eye(4)).log_prob(x)


@pytest.mark.parametrize("kind", ["buffer", "attribute", "parameter"])
def test_a_sparse_tensor_that_the_model_holds_is_refused(kind: str) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edges: Tensor
            edges = torch.eye(3).to_sparse()
            if kind == "buffer":
                self.register_buffer("edges", edges)
            else:
                self.edges = nn.Parameter(edges) if kind == "parameter" else edges

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.edges, x)

    with pytest.raises(CaptureError) as caught:
        capture(Graph(), (torch.ones(3, 2),), training=False)
    assert str(caught.value) == (
        f"{kind} edges is torch.sparse_coo, but a program computes on dense tensors; make it dense with .to_dense(), or keep its "
        "indices and values, and multiply by index_select and index_add"
    )


def test_the_setting_of_a_distribution_that_avoids_its_check_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # which torch.compile changes
    with pytest.raises(CaptureError, match=r"; here, set validate_args=False where the distribution is made\n"):
        capture(Correlated(4, 4), (torch.ones(2, 4),), training=True)


def test_a_model_that_fails_in_its_first_call_under_a_lock_says_why() -> None:
    class Fails(Model):
        def forward(self, x: Tensor) -> Tensor:
            with LOCK:
                return self.layer(x) * self.missing  # <line>

    with pytest.raises(CaptureError) as error:
        capture(Fails(), (torch.ones(2, 4),), training=True)
    assert re.match(
        r"the model fails for these arguments, .*: AttributeError: 'Fails' object has no attribute 'missing'\n"
        r"  .*test_capture_errors.py:\d+: return self.layer\(x\) \* self.missing",
        str(error.value),
    )


@pytest.mark.parametrize("keep", [setattr, nn.Module.register_buffer])
def test_a_tensor_that_is_kept_under_a_lock_is_refused(keep: Any) -> None:
    class Keeps(Model):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "kept"):
                with LOCK:
                    keep(self, "kept", torch.ones(4))
            return self.layer(x) * self.kept

    with pytest.raises(CaptureError) as error:
        capture(Keeps(), (torch.ones(2, 4),), training=True)
    assert str(error.value) == (
        "the model computes kept in its first call, under a lock, and keeps it, but a graph is built on tensors without data; "
        "compute it in __init__, and keep it in a buffer (register_buffer)"
    )


@pytest.mark.skipif(release() >= (2, 14), reason="dynamo of torch 2.14 reads the code without importing its module")
def test_a_module_that_python_does_not_know_is_named(tmp_path: Path) -> None:
    path = tmp_path / "loaded_by_hand.py"
    path.write_text("import torch\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return torch.relu(x)\n")
    spec = spec_from_file_location("loaded_by_hand", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(CaptureError, match=r"imports the module 'loaded_by_hand' to read .*: sys\.modules\['loaded_by_hand'\] ="):
        capture(module.Net(4, 4), (torch.ones(2, 4),), training=True)


def test_a_wrapped_model_is_given_without_its_wrapper() -> None:
    with pytest.raises(CaptureError, match=r"the model is wrapped in DataParallel, .*; give model\.module$"):
        capture(nn.DataParallel(nn.Linear(4, 4)), (torch.ones(2, 4),), training=True)


def test_the_settings_of_torchs_modules_that_avoid_a_decision_by_value_are_named() -> None:
    with pytest.raises(CaptureError, match=r"; here, set momentum to a number, such as 0.1, in BatchNorm\n"):
        capture(nn.BatchNorm1d(4, momentum=None), (torch.ones(2, 4),), training=True)


def test_torch_does_not_log_the_traceback_of_a_wrong_shape(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match="a and b must have same reduction dim"):
        capture(nn.Linear(4, 4), (torch.ones(2, 5),), training=True)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("file", "condition", "setting"),
    [
        ("drops_layers", "skip_the_layer", "layerdrop=0 (encoder_layerdrop=0, decoder_layerdrop=0)"),
        ("modeling_deberta", "label_index", 'problem_type="single_label_classification"'),
        ("cache_utils", "is_full_to_here", "use_cache=False"),
        ("masks", "flex_attention_mask_is_full", 'attn_implementation="sdpa"'),
        ("integrations.moe", "expert_hit", 'experts_implementation="grouped_mm"'),
        ("modeling", "expert_hit", ""),  # no class that takes the setting
    ],
)
def test_the_setting_of_a_library_that_avoids_it_is_named(
    file: str, condition: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "transformers" / f"{file.replace('.', '/')}.py"
    path.parent.mkdir(parents=True)
    path.write_text(DROPS_LAYERS.replace("skip_the_layer", condition))
    monkeypatch.syspath_prepend(tmp_path / "transformers")
    module = import_module(file)
    with pytest.raises(CaptureError) as raised:
        capture(module.Drops(4, 4), (torch.ones(2, 4),), training=True)
    here = f"; here, set {setting} in the model's config" if setting else ""
    assert str(raised.value) == (
        "the model branches on the value of a tensor, but a graph takes one path for all values; compute both sides and "
        f"choose with torch.where(condition, a, b){here}\n  {path}:7: {path.read_text().splitlines()[6].strip()}"
    )


SETS_UP_AND_ROUTES = """
import threading
import torch

LOCK = threading.Lock()

class Routes(torch.nn.Linear):
    is_set_up = False

    def forward(self, x):
        if not self.is_set_up:
            with LOCK:
                self.is_set_up = True
        y = super().forward(x)
        expert_hit = y.sum(0).greater(0).nonzero()
        return sum(y.sum() * expert[0] for expert in expert_hit)
"""


def test_experts_in_a_loop_are_named_where_the_model_sets_itself_up_in_its_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "transformers" / "integrations" / "moe.py"
    path.parent.mkdir(parents=True)
    path.write_text(SETS_UP_AND_ROUTES)
    spec = spec_from_file_location("sets_up_and_routes", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sets_up_and_routes", module)
    spec.loader.exec_module(module)
    with pytest.raises(CaptureError) as raised:
        capture(module.Routes(4, 4), (torch.ones(2, 4),), training=True)
    assert str(raised.value) == (
        "the model makes a tensor whose shape depends on values, but the shapes of a graph are fixed; keep all elements and "
        "blank out with torch.where, a product with the mask, or masked_fill; here, set "
        f'experts_implementation="grouped_mm" in the model\'s config\n  {path}:15: '
        "expert_hit = y.sum(0).greater(0).nonzero()"
    )


def test_a_count_of_fixed_length_is_captured() -> None:
    class CountsInstead(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sum() + nn.functional.one_hot(x[0].long(), 4).sum(0).sum()

    capture(CountsInstead(), (torch.ones(2, 4),), training=True)


@pytest.mark.parametrize("model", [Branches, Mismatches])
def test_torchs_own_pages_are_in_the_log_alone(
    model: type[Model], caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    with caplog.at_level("INFO", "autoshard.capture"), pytest.raises(CaptureError) as raised:
        capture(model(), (torch.ones(2, 4),), training=True)
    shown = "".join(traceback.format_exception(raised.value))
    assert "direct cause" not in shown and "During handling" not in shown
    assert [str(one.message) for one in recwarn] == []
    assert any(record.name == "autoshard.capture" and record.exc_info for record in caplog.records)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_other_recurrent_layers_that_drop_are_refused(kind: Any) -> None:
    with pytest.raises(CaptureError, match="torch loses the dropout"):
        capture(kind(4, 4, num_layers=2, dropout=0.3), (torch.ones(2, 4),), training=True)


def test_a_recurrent_layer_in_evaluation_is_captured() -> None:
    capture(nn.RNN(4, 4, num_layers=2, dropout=0.3).eval(), (torch.ones(2, 4),), training=True)


def test_a_failed_capture_leaves_no_trace() -> None:
    with pytest.raises(CaptureError):
        capture(ReadsItem(), (torch.ones(2, 4),), training=True)
    assert torch.is_grad_enabled()
    assert torch.ones(2).sum().item() == 2
    assert capture(nn.Linear(4, 4), (torch.ones(2, 4),), training=True).parameters == ("weight", "bias")


class Takes(nn.Module):
    def forward(self, x: Tensor, batch: Any = None, *, scale: float = 1.0, name: str = "a") -> Any:
        return x * scale if batch is None else x * scale + batch["y"]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (),
            {"scale": 2.0},
            "Takes.forward(x: 'Tensor', batch: 'Any' = None, *, scale: 'float' = 1.0, name: 'str' = 'a') -> 'Any' "
            "cannot take (scale=2.0): missing a required argument: 'x'",
        ),
        (
            (torch.ones(2), [torch.ones(3)]),
            {"scales": 2.0},
            "Takes.forward(x: 'Tensor', batch: 'Any' = None, *, scale: 'float' = 1.0, name: 'str' = 'a') -> 'Any' "
            "cannot take (float32[2], list, scales=2.0): got an unexpected keyword argument 'scales'",
        ),
        (
            (Result(torch.ones(2)),),
            {},
            "argument x is a Result, which is neither a tensor nor a constant; pass tensors in tuples, lists, dicts or "
            "dataclasses, or register the class with torch.utils._pytree.register_pytree_node",
        ),
        (
            (np.ones(2),),
            {},
            "argument x is an ndarray, which is neither a tensor nor a constant; give torch.from_numpy(...) of it",
        ),
        (
            (torch.ones(2), KeysCache(torch.ones(2))),
            {},
            "argument batch is a KeysCache, which is neither a tensor nor a constant; call the model, or its generate(), "
            "with use_cache=False",
        ),
        (
            (torch.ones(2), {"y": {"z": 1}, "y.z": 2}),
            {},
            "two arguments are both called 'batch.y.z'; rename a key, without a dot in it",
        ),
    ],
)
def test_arguments_that_do_not_fit_forward_are_refused(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises((CaptureError, InputError)) as raised:
        capture(Takes(), args, kwargs, training=True)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (),
            {},
            "forward(x: 'Tensor', batch: 'Any' = None, *, scale: 'float' = 1.0, name: 'str' = 'a') -> 'Any' cannot be "
            "called like this: missing a required argument: 'x'",
        ),
        (
            (torch.ones(2), {}),
            {},
            "the call lacks batch.y: float32[2], which the captured call had; give it, or capture the model without",
        ),
        (
            (torch.ones(2), {"y": 3.0}),
            {},
            "batch.y is 3.0, but the model was captured with float32[2]; give a tensor, or capture the model with this "
            "value",
        ),
        (
            (torch.ones(2), {"y": torch.ones(2), "z": torch.ones(3)}),
            {},
            "the call has batch.z = float32[3], which the captured call had not; leave it out, or capture the model with "
            "it",
        ),
        (
            (torch.ones(2), {"y": torch.ones(2)}),
            {"scale": 2},
            "scale is 2, but the model was captured with scale = 1.0, and what is no tensor is a constant of the graph; "
            "pass it as a tensor, or capture the model once per value",
        ),
        (
            (torch.ones(2), {"y": torch.ones(2)}),
            {"scale": torch.ones(())},
            "scale is float32[], but the model was captured with scale = 1.0; capture the model with a tensor to make it "
            "an input",
        ),
    ],
)
def test_calls_that_do_not_fit_the_capture_are_refused(args: Any, kwargs: Any, message: str) -> None:
    captured = capture(Takes(), (torch.ones(2), {"y": torch.ones(2)}), training=True)
    with pytest.raises(InputError) as raised:
        captured.signature.flatten(args, kwargs)
    assert str(raised.value) == message
