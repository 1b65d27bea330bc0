"""Draw a case, a program and how it is sharded, from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from autoshard.debug.simulated_ranks import Call, run_on_one_device
from tests.random_programs.holes import (
    LARGE_SIZES,
    LARGEST,
    LARGEST_COMPILED,
    ODD_SIZES,
    SIZES,
    Scope,
    Unfit,
    evaluate,
    is_fit,
)
from tests.random_programs.productions import KINDS
from tests.random_programs.program import ALONE, Case, Layer, Program, Setting, default_dtype, execute

MESHES = (
    *("dp=2", "tp=2", "dp=4", "tp=4", "dp=2,tp=2", "dp=2,tp=2", "tp=2,dp=2", "a=2,b=2,c=2", "dp=2,tp=4", "dp=4,tp=2"),
    *("dp=8", "dp=3", "tp=3,dp=2", "dp=1,tp=2", "pod=2,dp=2,tp=2"),
)
RECIPES = ("ddp", "fsdp", "zero2", "megatron", "megatron", None)
HARDWARE = ("auto", "auto", "h100", "a100", "a100-pcie", "b200", "gb200", "h200", "cpu", None)
DTYPES = ("float64",) * 7 + ("float32",) * 3
MEMORY = (1.0, 0.9, 0.9, 0.7, 0.7, 0.5, 0.001)  # limits, as parts of the peak without one; the last cannot be met
LAYERS = 0.3  # chance of a program with layers
RANKS = 0.06  # chance that a program that gives a loss runs on gloo ranks
# Of compiled programs, how often a kind is drawn: where Inductor fuses loops around writes and reads.
OFTEN = {"windows": 4, "writes": 4, "convolutions": 2, "in place": 4, "index": 4, "norms": 2, "random": 0}
VARIED = 0.3  # chance that a compiled program is varied
FAILURES = 200  # of drawing a step or program, after which something is wrong here
Drawn = list[str]  # names of productions
Axes = Mapping[str, int]  # of a mesh: their sizes


def draw(seed: int, *, ranks: bool = True, compiled: bool = False) -> Case:
    """Return the case of a seed, on simulated ranks alone unless `ranks`; if `compiled`, one that Inductor's code may fail."""
    random = Random(seed)
    for _ in range(FAILURES):
        names: Drawn = []
        program = _program(random, names, compiled=compiled)
        if program is not None and runs(program, largest=LARGEST_COMPILED if compiled else LARGEST):
            if compiled and draws_numbers(program):
                continue
            setting = _compiled(random) if compiled else _setting(random, program)
            return Case(program, setting if ranks else replace(setting, ranks=None), tuple(dict.fromkeys(names)))
    raise AssertionError(f"seed {seed}: no program could be drawn")


def runs(program: Program, *, largest: float = LARGEST) -> bool:
    """Return whether a program runs on one device, with no more numbers, and no larger ones, than is_fit allows."""
    try:
        model, args = program.make()
        with default_dtype(program.dtype):
            step = run_on_one_device(Call(model, args, {}))
    except Exception:  # whatever torch refuses
        return False
    found = (*step.outputs.values(), *step.gradients.values(), *step.buffers.values())
    return bool(step.outputs) and all(is_fit(value, largest) for value in found if value.numel())


def _program(random: Random, names: Drawn, *, compiled: bool) -> Program | None:
    sizes = tuple(random.sample(SIZES, 3)) + ((random.choice(ODD_SIZES),) if random.random() < 0.4 else ())
    if compiled and random.random() < 0.5:
        sizes = (sizes[0], *random.sample(LARGE_SIZES, 2))
    dtype = random.choice(DTYPES)
    with default_dtype(dtype), torch.random.fork_rng():
        torch.manual_seed(0)
        scope = Scope(random, sizes, often=OFTEN if compiled else {}, largest=LARGEST_COMPILED if compiled else LARGEST)
        shape = [random.choice(sizes) for _ in range(random.choice([1, 2, 2, 3, 3, 3, 4]))]
        shape[0] = 8 if random.random() < 0.6 else shape[0]  # the batch, which recipes split
        scope.inputs["a0"] = f"torch.randn({', '.join(map(str, shape))})"
        scope.values["a0"] = evaluate(scope.inputs["a0"])
        layer = None
        for _ in range(random.choice([1, 2, 3, 3, 4, 5, 6])):
            if layer is None and random.random() < LAYERS / 3:
                layer = _layer(scope, names)
            elif not _step(scope, names):
                return None
        returns = _returns(scope)
    inputs = {
        name: f"{one}.requires_grad_()" if "randn" in one and "1j" not in one and random.random() < 0.15 else one
        for name, one in scope.inputs.items()
    }
    state = dict(scope.state)
    if random.random() < 0.1:
        state["unused"] = "nn.Parameter(torch.randn(4, 4))"
    return Program(inputs, state, tuple(scope.lines), returns, dtype, layer)


def _step(scope: Scope, names: Drawn) -> bool:
    for _ in range(FAILURES):
        kinds = [productions for _, productions in KINDS.values()]
        weights = [scope.often.get(name, weight) for name, (weight, _) in KINDS.items()]
        kind = scope.random.choices(kinds, weights)[0]
        name = scope.random.choice([*kind])
        try:
            scope.add(kind[name])
        except Exception:  # Unfit, or whatever torch refuses
            continue
        names.append(name)
        return True
    return False


def _layer(scope: Scope, names: Drawn) -> Layer | None:
    """Add layers that are equal but for their parameters."""
    whole = {name: tensor for name, tensor in scope.values.items() if tensor.dtype is torch.get_default_dtype()}
    h = [name for name, tensor in whole.items() if tensor.dim() >= 2]
    if not h:
        return None
    inner = Scope(scope.random, scope.sizes, {"h": whole[h[-1]]}, takes_inputs=False, often=scope.often, largest=scope.largest)
    for _ in range(scope.random.randint(1, 3)):
        _step(inner, names)
    last, tensor = [*inner.values.items()][-1]
    shape = whole[h[-1]].shape
    if tensor.dtype is not whole[h[-1]].dtype:
        return None
    if tensor.shape != shape:
        if tensor.shape[:-1] != shape[:-1]:
            return None
        inner.state["out"] = f"nn.Parameter(torch.randn({shape[-1]}, {tensor.shape[-1]}) / 3)"
        last = f"F.linear({last}, self.out)"
    depth = scope.random.choice([2, 2, 3, 4])
    layer = Layer(inner.state, tuple(inner.lines), scope.random.choice([f"h + {last}", last]), depth)
    scope.module.layers = torch.nn.ModuleList(execute(layer.source())["Layer"]() for _ in range(depth))
    names.append("layers")
    try:
        scope.add(f"{{new}} = {h[-1]}\nfor layer in self.layers:\n    {{new}} = layer({{new}})")
    except Unfit:
        return None
    return layer


def _returns(scope: Scope) -> str:
    """Return an expression of all that nothing else reads: a loss, or a dict or tuple of values."""
    text = "\n".join(scope.lines)
    made = [name for name in scope.values if name.startswith("v")] or ["a0"]
    ends = [name for name in made if text.count(name) == text.count(f"{name} =") or name == made[-1]]
    numbers = [name for name in ends if scope.values[name].is_floating_point() or scope.values[name].is_complex()]
    if not numbers:
        numbers, ends = ["a0"], [*ends, "a0"]
    if scope.random.random() < 0.55:
        return " + ".join(_loss(scope, name) for name in numbers)
    match scope.random.choice(["dict", "tuple", "one", "loss and values"]):
        case "dict":
            return "{" + ", ".join(f"'{name}': {name}" for name in ends) + "}"
        case "tuple":
            return f"({', '.join(ends)},)"
        case "one":
            return numbers[-1]
        case _:
            return f"{{'loss': {_loss(scope, numbers[-1])}, 'more': [{', '.join(ends[:-1])}]}}"


def _loss(scope: Scope, name: str) -> str:
    value = f"{name}.abs()" if scope.values[name].is_complex() else name
    return scope.random.choice(["{}.square().mean()", "{}.sum()", "{}.mean()", "{}.tanh().sum()"]).format(value)


# --- how it is sharded


def draws_numbers(program: Program) -> bool:
    """Return whether a program draws random numbers, which differ between the ranks and one device."""
    text = "\n".join((*program.lines, *(program.layer.lines if program.layer else ())))
    return any(word in text for word in ("dropout", "rand", "bernoulli"))


def _compiled(random: Random) -> Setting:
    training = random.random() < 0.9
    return Setting("dp=1", None, "fsdp", training, ranks=ALONE, varied=training and random.random() < VARIED)


def _setting(random: Random, program: Program) -> Setting:
    mesh = random.choice(MESHES)
    axes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}
    recipe: Any = "auto"
    if random.random() < 0.5:
        recipe = {axis: random.choice(RECIPES) for axis in axes}
        if len(axes) > 1 and random.random() < 0.15:
            recipe |= dict.fromkeys(random.sample([*axes], 2), "hsdp")
    setting = Setting(
        mesh,
        random.choice(HARDWARE),
        recipe,
        random.random() < 0.8,
        _options(random, program, axes),
        random.choice(MEMORY) if random.random() < 0.15 else None,
    )
    is_loss = program.returns.endswith(("sum()", "mean()"))
    is_exact = "mixed_precision" not in setting.options and not draws_numbers(program)
    if setting.memory is None and is_loss and is_exact and random.random() < RANKS:
        return replace(setting, ranks=random.choice(["eager", "eager", "inductor"]))
    return setting


def _options(random: Random, program: Program, axes: Axes) -> dict[str, Any]:
    """Return options of which each is drawn in few programs, so that most differ from the defaults in one or two."""
    options: dict[str, Any] = {}
    for name, chance, choices in (
        ("recompute", 0.2, ["block", "none"]),
        ("overlap", 0.2, [False, {"bucket_bytes": 0}, {"bucket_bytes": 256}, {"split_matmuls": False}]),
        ("reshard_after_forward", 0.1, [True, False]),
        ("mixed_precision", 0.05, ["float32", "bfloat16"]),
        ("optimizer", 0.1, ["sgd", None]),
        ("loss", 0.1, ["sum"]),
    ):
        if random.random() < chance:
            options[name] = random.choice(choices)
    model, args = program.make()
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    inputs = {name: tuple(tensor.shape) for name, tensor in zip(program.inputs, args, strict=True)}
    with default_dtype(program.dtype):
        step = run_on_one_device(Call(model, args, {}), training=False)
    outputs = {name: tuple(tensor.shape) for name, tensor in step.outputs.items()}
    for name, chance, shapes in (("params", 0.2, parameters), ("inputs", 0.1, inputs), ("outputs", 0.05, outputs)):
        if random.random() < chance and (found := _placements(random, axes, shapes)):
            options[name] = found
    return options


def _placements(random: Random, axes: Axes, shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, str]]:
    """Return placements of about half of some tensors, most of them on one axis, and such that axes divide dims."""
    found: dict[str, dict[str, str]] = {}
    for name, shape in shapes.items():
        for axis in random.sample([*axes], len(axes) if random.random() < 0.3 else 1):
            dims = [dim for dim, size in enumerate(shape) if size % axes[axis] == 0 or random.random() < 0.03]
            if random.random() < 0.5:
                found.setdefault(name, {})[axis] = random.choice(["R", *(f"S({dim})" for dim in dims)])
    return found
