"""Ways to change or call a sharded model after capture: each works, is captured again or is refused; none is ignored.

`docs/calls.md` has the table, which a test compares with what happens here: on a mesh of one rank, each way is done to a
sharded model that was called before and to the model that it was made from; outputs and gradients then have to be equal.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from autoshard import Options, UserError, autoshard

PAGE = Path(__file__).parents[2] / "docs" / "calls.md"
X = torch.linspace(-1, 1, 12).reshape(3, 4)
Y = torch.linspace(1, -1, 12).reshape(3, 4)


GAMMA = 1.0  # read by the model, as are the next two, and this one:
os.environ["FACTOR"] = "1"


def rescaling() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    by = 1.0

    def rescaled(x: Tensor) -> Tensor:
        return x * by

    def change(to: float) -> None:
        nonlocal by
        by = to

    return rescaled, change


rescaled, rescale = rescaling()


class Block(nn.Module):
    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.0)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).tanh() * self.gain * self.slope


class Model(nn.Module):
    """Reads attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))
        self.constant = torch.ones(4)
        self.alpha = 1.0
        self.residual = True
        self.gradient_checkpointing = False
        self.config = SimpleNamespace(scale=1.0, nested={"power": 1.0})
        self.factors = [1.0, 1.0]
        self.unread = 0

    def forward(self, x: Tensor, y: Tensor | None = None, *, times: float = 1.0) -> Tensor:
        h: Any = checkpoint(self.block, x, use_reentrant=False) if self.gradient_checkpointing else self.block(x)
        h = self.norm(h + x if self.residual else h) + self.offset * self.constant
        h = rescaled(self.head(h)) * GAMMA * float(os.environ["FACTOR"])
        h = h * self.alpha * self.config.scale * self.config.nested["power"] * times
        for factor in self.factors:
            h = h * factor
        return h if y is None else F.mse_loss(h, y)

    def encode(self, x: Tensor) -> Tensor:
        return self.block(x)


class Loud(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2


Way = Callable[[Any], Any]
WAYS: dict[str, Way] = {}


def way(text: str) -> Callable[[Way], Way]:
    def add(function: Way) -> Way:
        assert text not in WAYS
        WAYS[text] = function
        return function

    return add


def setting(text: str, change: Way) -> None:
    """Add a way that changes the model, after which it is called as before."""

    def done(model: Any) -> Any:
        change(model)
        return model(X, Y)

    WAYS[text] = done


def doubled(*given: Any) -> Any:
    return given[-1] * 2


def halved_inputs(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return args[0] / 2, *args[1:]


def doubled_forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self.head(x) * 2, y)


def wrap_forward(model: Any) -> None:
    before = model.forward
    model.forward = lambda *args: before(*args) * 2


def new(kind: Callable[..., nn.Module], *args: Any) -> Any:
    torch.manual_seed(5)
    return kind(*args)


def new_head() -> Any:
    return new(nn.Linear, 4, 4)


def set_data(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.mul_(2)


# what is called otherwise
setting("nothing", lambda model: None)
WAYS["a smaller batch"] = lambda model: model(X[:2], Y[:2])
WAYS["without labels"] = lambda model: model(X).square().sum()
WAYS["another Python number: `model(x, y, times=2.0)`"] = lambda model: model(X, Y, times=2.0)
WAYS["twice before a backward"] = lambda model: model(X, Y) + model(X, Y)
WAYS["`model.forward(x, y)`"] = lambda model: model.forward(X, Y)
WAYS["`torch.autograd.grad`"] = lambda model: torch.autograd.grad(model(X, Y), list(model.parameters()))[0].sum()
WAYS["an input that needs a gradient"] = lambda model: model(X.clone().requires_grad_(), Y)
WAYS["a loss with `sum(p.square().sum() for p in model.parameters())`"] = lambda model: (
    model(X, Y) + 0.1 * sum(p.square().sum() for p in model.parameters())
)
WAYS["`torch.utils.checkpoint` around the model"] = lambda model: checkpoint(model, X, Y, use_reentrant=False)
WAYS["a copy: `copy.deepcopy(model)`"] = lambda model: copy.deepcopy(model)(X, Y)
WAYS["an average: `AveragedModel(model)`"] = lambda model: AveragedModel(model)(X, Y)
WAYS["a method: `model.encode(x)`"] = lambda model: model.encode(X).sum()
WAYS["a submodule: `model.block(x)`"] = lambda model: model.block(X).sum()
WAYS["`pickle.dumps(model)`"] = lambda model: pickle.dumps(model) and model(X, Y)
WAYS["`torch.func.functional_call` with values like the parameters"] = lambda model: torch.func.functional_call(
    model, {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}, (X, Y)
)
WAYS["`torch.func.functional_call` with plain tensors"] = lambda model: torch.func.functional_call(
    model, {"head.bias": torch.zeros(4)}, (X, Y)
)


@way("`torch.no_grad()`")
def _no_grad(model: Any) -> Any:
    with torch.no_grad():
        return model(X, Y)


@way("`torch.inference_mode()`")
def _inference(model: Any) -> Any:
    with torch.inference_mode():
        return model(X, Y)


@way("`torch.autocast`")
def _autocast(model: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.tensor(float(model(X).dtype is torch.bfloat16))


@way("anomaly mode that looks for NaN")
def _anomaly(model: Any) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        return model(X, Y)


@way("anomaly mode with `check_nan=False`")
def _anomaly_without_nan(model: Any) -> Any:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return model(X, Y)


@way("a hook on all modules: `register_module_forward_hook`")
def _global_hook(model: Any) -> Any:
    handle = register_module_forward_hook(lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else None)
    try:
        return model(X, Y)
    finally:
        handle.remove()


@way("`torch.func.vmap` over it")
def _vmap(model: Any) -> Any:
    return torch.func.vmap(model)(torch.stack([X, X])).sum()


@way("`torch.func.jvp` through it")
def _jvp(model: Any) -> Any:
    return torch.func.jvp(lambda x: model(x, Y), (X,), (X,))[1]


@way("forward-mode derivatives: `torch.autograd.forward_ad`")
def _forward_mode(model: Any) -> Any:
    with forward_ad.dual_level(), torch.no_grad():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, X), Y)).tangent


@way("a second derivative: `backward(create_graph=True)`")
def _second_derivative(model: Any) -> Any:
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x, Y), x, create_graph=True)
    return first.square().sum()


@way("many gradients at once: `torch.autograd.grad(..., is_grads_batched=True)`")
def _batched(model: Any) -> Any:
    x = X.clone().requires_grad_()
    y = model(x, Y)
    return torch.autograd.grad(y, x, torch.stack([torch.ones_like(y), y.detach()]), is_grads_batched=True)[0].sum()


def compiled_step(model: Any) -> Any:
    return torch.compile(lambda x, y: model(x, y) * 2, backend="eager")(X, Y)


WAYS["`torch.compile(model)`"] = lambda model: torch.compile(model, backend="eager")(X, Y)
WAYS["`torch.compile` of a function that calls it"] = compiled_step
WAYS["`torch.compile(model, fullgraph=True)`"] = lambda model: torch.compile(model, backend="eager", fullgraph=True)(X, Y)
WAYS["`torch.export.export(model, ...)`"] = lambda model: torch.export.export(model, (X, Y)).module()(X, Y)
WAYS["`torch.jit.trace(model, ...)`"] = lambda model: torch.jit.trace(model, (X, Y))(X, Y)
WAYS["`DistributedDataParallel(model)`"] = lambda model: DistributedDataParallel(model)(X, Y)
WAYS["`fully_shard(model)`"] = lambda model: fully_shard(model, mesh=model.head.weight.device_mesh)(X, Y)
WAYS["another thread"] = lambda model: ThreadPoolExecutor(1).submit(model, X, Y).result()
WAYS["its own output: `model(model(x), y)`"] = lambda model: model(model(X), Y)
WAYS["a sparse tensor"] = lambda model: model(X.to_sparse(), Y)
WAYS["an empty batch"] = lambda model: model.eval()(X[:0]).sum()
WAYS["`model.share_memory()`"] = lambda model: model.share_memory()(X, Y)


# what is changed on the model
setting("`model.eval()`", lambda model: model.eval())
setting("`model.block.eval()`", lambda model: model.block.eval())
setting("a number: `model.alpha = 0.5`", lambda model: setattr(model, "alpha", 0.5))
setting("a number of a submodule: `model.block.gain = 2.0`", lambda model: setattr(model.block, "gain", 2.0))
setting("a flag: `model.residual = False`", lambda model: setattr(model, "residual", False))
setting("a dropout's `p`", lambda model: setattr(model.block.dropout, "p", 1.0))
setting("an object's attribute: `model.config.scale = 2.0`", lambda model: setattr(model.config, "scale", 2.0))
setting("a dict inside it: `model.config.nested['power'] = 2.0`", lambda model: model.config.nested.update(power=2.0))
setting("a list: `model.factors[0] = 3.0`", lambda model: model.factors.__setitem__(0, 3.0))
setting("a longer list: `model.factors.append(2.0)`", lambda model: model.factors.append(2.0))
setting("an attribute that no code reads: `model.unread += 1`", lambda model: setattr(model, "unread", 1))
setting("`model.gradient_checkpointing = True`", lambda model: setattr(model, "gradient_checkpointing", True))
setting("a submodule: `model.head = nn.Linear(4, 4)`", lambda model: setattr(model, "head", new_head()))
setting("a submodule of another class: `model.block = Other()`", lambda model: setattr(model, "block", new(Loud)))
setting("a submodule without parameters: `model.norm = nn.Identity()`", lambda model: setattr(model, "norm", nn.Identity()))
setting("a parameter: `model.head.weight = nn.Parameter(...)`", lambda model: setattr(model.head, "weight", new_head().weight))
setting("no parameter: `model.head.bias = None`", lambda model: setattr(model.head, "bias", None))
setting(
    "parameters tied: `model.head.weight = model.block.linear.weight`",
    lambda model: setattr(model.head, "weight", model.block.linear.weight),
)
setting("a parameter's values, under `torch.no_grad()`", set_data)
setting("a parameter's values: `model.head.weight.data = ...`", lambda model: setattr(model.head.weight, "data", torch.eye(4)))
setting("`load_state_dict`", lambda model: model.head.load_state_dict(new_head().state_dict()))
setting("`model.head.requires_grad_(False)`", lambda model: model.head.requires_grad_(False))
setting("a buffer: `model.offset = torch.ones(4)`", lambda model: setattr(model, "offset", torch.ones(4)))
setting("a buffer's values: `model.offset.add_(1)`", lambda model: model.offset.add_(1))
setting("a tensor attribute: `model.constant = torch.zeros(4)`", lambda model: setattr(model, "constant", torch.zeros(4)))
setting("a tensor attribute's values: `model.constant.mul_(3)`", lambda model: model.constant.mul_(3))
setting("a forward hook", lambda model: model.block.register_forward_hook(doubled))
setting("a forward pre-hook", lambda model: model.block.register_forward_pre_hook(halved_inputs))
setting("a forward hook of the model itself", lambda model: model.register_forward_hook(doubled))
setting("a full backward hook", lambda model: model.block.register_full_backward_hook(lambda module, into, out: (into[0] * 2,)))
setting("a hook on a parameter's gradient", lambda model: model.head.weight.register_hook(doubled))
setting(
    "a forward of a submodule: `block.forward = types.MethodType(...)`",
    lambda model: setattr(model.block, "forward", MethodType(lambda self, x: self.linear(x) * 2, model.block)),
)
setting(
    "a forward of the model: `model.forward = types.MethodType(...)`",
    lambda model: setattr(model, "forward", MethodType(doubled_forward, model)),
)
setting("a wrapper of the model's forward", wrap_forward)
setting("a parametrization: `parametrizations.weight_norm(model.head)`", lambda model: parametrizations.weight_norm(model.head))
setting("`prune.l1_unstructured(model.head, 'weight', 0.5)`", lambda model: prune.l1_unstructured(model.head, "weight", 0.5))
setting("`nn.init.constant_(model.head.weight, 0.5)`", lambda model: nn.init.constant_(model.head.weight, 0.5))
setting("there and back: `model.double(); model.float()`", lambda model: model.double().float())


def elsewhere(text: str, change: Callable[[], object], undo: Callable[[], object]) -> None:
    """Add a way that changes what the model reads from outside of it."""

    def done(model: Any) -> Any:
        change()
        try:
            return model(X, Y)
        finally:
            undo()

    WAYS[text] = done


def set_global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().update({name: value})


def set_variable(value: str) -> Callable[[], None]:
    return lambda: os.environ.update(FACTOR=value)


elsewhere("a global: `train.GAMMA = 0.5`", set_global("GAMMA", 0.5), set_global("GAMMA", 1.0))
elsewhere("a global function: `train.rescaled = torch.sin`", set_global("rescaled", torch.sin), set_global("rescaled", rescaled))
elsewhere("an environment variable: `os.environ['FACTOR'] = '2'`", set_variable("2"), set_variable("1"))
elsewhere("a variable of an enclosing function", lambda: rescale(2.0), lambda: rescale(1.0))
elsewhere("a class's attribute: `Block.slope = 2.0`", lambda: setattr(Block, "slope", 2.0), lambda: setattr(Block, "slope", 1.0))
setting("a global that no code reads: `train.epoch = 3`", lambda model: globals().update(epoch=3))


@way("`model.half()`")
def _half(model: Any) -> Any:
    model.constant = model.constant.half()
    return model.half()(X.half(), Y.half())


@way("`model.to(torch.bfloat16)`")
def _bfloat16(model: Any) -> Any:
    model.constant = model.constant.bfloat16()
    return model.to(torch.bfloat16)(X.bfloat16(), Y.bfloat16())


WAYS["`model.double()`"] = lambda model: model.double()(X.double(), Y.double())


ALONE = (
    "refused: block (Block) was called outside of the sharded model's forward, where it has a part of each parameter only; call "
    "the sharded model, also where a function such as merge_and_unload() returned this part of it, or let forward call the part, "
    "chosen by an argument (model(x, only='encode')): each value of an argument gets a program of its own; to "
    "generate() with an encoder-decoder model, load the full state dict into a plain one"
)
FUNC = (
    "refused: a sharded model cannot be transformed by torch.func (vmap, grad, vjp, jvp, jacrev): it runs a program compiled "
    "for its forward and backward; call the transform inside of the model, or use backward() and torch.autograd.grad"
)
TRACED = (
    "refused: a sharded model cannot be exported or traced: it is a compiled program already; export the model that it was "
    "made from, after loading its state_dict()"
)
REFUSED = {
    "`torch.func.vmap` over it": FUNC,
    "`torch.func.jvp` through it": FUNC,
    "forward-mode derivatives: `torch.autograd.forward_ad`": "refused: a sharded model has no forward-mode derivative: its "
    "program has a forward and a backward; use backward(), or compute what needs it on one device",
    "`torch.compile(model, fullgraph=True)`": "refused: a sharded model runs a program of its own, which is compiled already; "
    "leave out fullgraph=True, and torch.compile what is around the call",
    "`torch.export.export(model, ...)`": TRACED,
    "`torch.jit.trace(model, ...)`": TRACED,
    "`DistributedDataParallel(model)`": "refused: a sharded model must not be wrapped in DistributedDataParallel, by itself or "
    "in another module: its gradients are those of the global batch already; use it as it is (with accelerate, prepare "
    "optimizer and data alone; with Lightning, give Trainer(strategy=ModelParallelStrategy(...)); transformers.Trainer counts on "
    "a loss per process: write the loop)",
    "`fully_shard(model)`": "refused: parameter 'block.linear.weight' is distributed once more, as by fully_shard or "
    "parallelize_module, and the model is sharded over dp=1 already; leave the former out",
    "a sparse tensor": "refused: input 'x' is torch.sparse_coo, but a program takes dense tensors; give .to_dense()",
    "`model.share_memory()`": "refused: the parameters of a sharded model cannot be put into shared memory: each rank has its "
    "own parts; share the model that it is made from before autoshard(...)",
    "`prune.l1_unstructured(model.head, 'weight', 0.5)`": "refused: buffer 'head.weight_mask' is a DTensor, such as "
    "torch.nn.utils.prune makes of a parameter; buffers are whole on every rank: give .full_tensor(), or prune before "
    "autoshard(...)",
    "a method: `model.encode(x)`": ALONE,
    "a submodule: `model.block(x)`": ALONE,
    "`pickle.dumps(model)`": "refused: a sharded model cannot be pickled: it holds process groups and compiled code; save its "
    "state_dict() with torch.distributed.checkpoint, and shard the model again after loading (copy.deepcopy makes a second one)",
    "`torch.func.functional_call` with plain tensors": "refused: parameter 'head.bias' was replaced by a plain tensor; give a "
    "DTensor that is laid out as the parameter, such as one made from model.named_parameters(), or an nn.Parameter, which is "
    "taken over",
    "anomaly mode that looks for NaN": "refused: anomaly mode looks for NaN with an op that DTensor gradients do not have; use "
    "torch.autograd.set_detect_anomaly(True, check_nan=False), or look for NaN on one device",
    "many gradients at once: `torch.autograd.grad(..., is_grads_batched=True)`": "refused: many gradients in one backward "
    "(is_grads_batched=True, jacobian(vectorize=True)) are computed by vmap, which cannot transform the compiled backward of a "
    "sharded model; call torch.autograd.grad for each of them, with retain_graph=True",
    "a full backward hook": "refused: a module of the model has a backward hook, but the backward is part of the graph; remove "
    "the hook and write what it does as a torch.autograd.Function",
}
EAGER = Options(recipe="fsdp", compile="eager")


def outcome(mesh: DeviceMesh, done: Way) -> str:
    """Return what came of a way to change or call a model: it has the numbers of one device, or it is refused."""
    torch.manual_seed(0)
    model = Model()
    sharded: Any = autoshard(model, mesh, options=EAGER)
    for one in (model, sharded):
        one(X, Y).backward()
        one.zero_grad()
    before = len(sharded.programs)
    try:
        got = done(sharded)
    except UserError as error:
        return f"refused: {str(error).splitlines()[0]}"
    except Unsupported as error:  # of dynamo, with our reason
        return f"refused: {str(error).partition('(reason: ')[2].partition(')')[0]}"
    want = done(model)
    for result in (got, want):
        if result.requires_grad:
            result.backward()
    check_close(whole(got.detach()), want.detach())
    expected = dict(model.named_parameters())
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor), name
        gradient = expected[name].grad
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is not None:
            check_close(whole(parameter.grad), gradient)
    return "works" if len(sharded.programs) == before else "captured again"


def check_close(got: Tensor, want: Tensor) -> None:
    rounds = want.dtype in (torch.float16, torch.bfloat16)  # one device rounds at other places
    torch.testing.assert_close(got, want, **({"rtol": 0.02, "atol": 0.02} if rounds else {}))


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def table() -> dict[str, str]:
    """Return the table of the page: ways, and what comes of each."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if row[0] != "way"}


@pytest.mark.slow  # all together
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", WAYS)
def test_every_way_has_one_devices_numbers_or_is_refused(one_rank: DeviceMesh, text: str) -> None:
    found = outcome(one_rank, WAYS[text])
    assert found == table()[text]
    assert found == REFUSED.get(text, found)


def test_the_table_has_every_way() -> None:
    assert set(table()) == set(WAYS)
    assert len(WAYS) >= 40


def test_an_optimizer_that_holds_a_replaced_parameter(one_rank: DeviceMesh) -> None:
    sharded: Any = autoshard(Model(), one_rank, options=EAGER)
    sharded(X, Y)
    sharded.head = nn.Linear(4, 4)
    early = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(X, Y).backward()
    with pytest.raises(UserError) as caught:
        early.step()
    assert str(caught.value) == (
        "the optimizer holds parameter 'head.weight' as it was before the sharded model took it over, so that it would never "
        "be trained; call the model once after replacing a parameter, then build the optimizer"
    )
    before = sharded.head.weight.full_tensor().clone()
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    assert not torch.equal(before, sharded.head.weight.full_tensor())


def test_what_changed_is_told_once(one_rank: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    sharded: Any = autoshard(Model(), one_rank, options=EAGER)
    sharded(X, Y)
    for _ in range(2):
        sharded.alpha = 0.5
        sharded(X, Y)
        sharded.alpha = 1.0
        sharded(X, Y)
    warned = [record.getMessage() for record in caplog.records if record.name == "autoshard.programs"]
    assert warned == ["the model changed, and is captured again: alpha: 1.0 -> 0.5"]
    assert len(sharded.programs) == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: setattr(model, "residual", False), "residual: True -> False"),
        (lambda model: setattr(model.config, "extra", {"a": 1}), "config.extra is new"),
        (lambda model: delattr(model.config, "nested"), "config.nested is gone"),
        (lambda model: model.head.register_forward_hook(lambda *_: None), "head._forward_hooks is new"),
        (
            lambda model: model.head.weight.requires_grad_(False),
            "head.weight: float32[4, 4], trained -> float32[4, 4], frozen",
        ),
    ],
)
def test_how_a_change_is_told(one_rank: DeviceMesh, change: Callable[[Any], object], told: str) -> None:
    """An object that is new or gone is one change, whatever it holds."""
    sharded: Any = autoshard(Model(), one_rank, options=EAGER)
    sharded(X, Y)
    states = sharded._autoshard.states
    before = states.current
    states.read(sharded, Model, None, (), ())
    change(sharded)
    states.update(sharded, Model)
    assert states.changes(before) == (told,)


SETTINGS: Any = {"power": 2.0, "uses": True}


def test_a_global_that_is_gone_is_one_state(one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that does not need it any more is captured once, whatever is in its place."""

    class Powers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h * SETTINGS["power"] if SETTINGS is not None and SETTINGS["uses"] else h

    model = Powers(4, 4)
    sharded: Any = autoshard(copy.deepcopy(model), one_rank, options=EAGER)
    before = SETTINGS
    for settings, programs in ((before, 1), ({"uses": False}, 2), (None, 3), (before, 3)):
        monkeypatch.setitem(globals(), "SETTINGS", settings)
        for _ in range(2):
            assert torch.equal(sharded(X), model(X))
        assert len(sharded.programs) == programs


def scaled(by: float) -> type[nn.Module]:
    class Scaled(nn.Linear):
        factor = by

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    return Scaled


def test_classes_of_one_name_are_told_apart(one_rank: DeviceMesh) -> None:
    kinds: list[Any] = [scaled(1.0), scaled(2.0)]
    model = nn.Sequential(*(kind(4, 4) for kind in kinds))
    sharded: Any = autoshard(copy.deepcopy(model), one_rank, options=EAGER)
    for kind in kinds:
        sharded(X)
        kind.factor += 3.0
        assert torch.equal(sharded(X), model(X))


def test_a_change_of_a_tied_weight_is_told_once(one_rank: DeviceMesh) -> None:
    model = Model()
    model.twin = model.head
    sharded: Any = autoshard(model, one_rank, options=EAGER)
    sharded(X, Y)
    states = sharded._autoshard.states
    before = states.current
    sharded.twin.weight.requires_grad_(False)
    states.update(sharded, Model)
    assert states.changes(before) == ("head.weight: float32[4, 4], trained -> float32[4, 4], frozen",)


def test_a_submodule_of_another_dtype(one_rank: DeviceMesh) -> None:
    sharded: Any = autoshard(Model(), one_rank, options=EAGER)
    sharded(X, Y)
    sharded.head.double()
    with pytest.raises(UserError) as caught:
        sharded(X, Y)
    assert str(caught.value) == (
        "parameter 'head.weight' is torch.float64 now, and was torch.float32 when the model was captured; convert the "
        "whole model: model.to(...)"
    )
