"""Check that a plan is for this model, mesh and options, and report what differs if it is not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest

from torch import nn

from autoshard.config.options import Options
from autoshard.config.settings import Settings, settings_of
from autoshard.plans.names import fold_text
from autoshard.plans.plan_values import Value
from autoshard.plans.record import PlanRecord, structure
from passes.errors import PlanError
from passes.ir.mesh import Mesh

SHOWN = 5  # differences that a message lists
_TAKEN = (
    ", give the plan's values, or leave options out: then all that a plan depends on is the plan's, and the others, such as "
    "compile and progress, have their defaults"
)


def check_asked(plan: PlanRecord, mesh: Mesh, options: Options) -> None:
    """Raise PlanError if `plan` was made for another mesh or with other options; warn if it was made with another
    torch.
    """
    present = settings_of(options, training=plan.settings.training, device=plan.settings.device)
    meshes = [f"the mesh is {mesh}, the plan's {plan.mesh}"] if str(mesh) != str(plan.mesh) else []
    given = [
        f"Options({name}={_brief(value)}), the plan has {name}={_brief(plan.settings.options.get(name))}"
        for name, value in present.options.items()
        if value != plan.settings.options.get(name)
    ]
    both = " and these options" if given else ""
    _refuse([*meshes, *given], f"Make a plan for this mesh{both}{_TAKEN if given else ''}")
    if present.torch != plan.settings.torch:
        warnings.warn(
            f"the plan was made with torch {plan.settings.torch} and runs with {present.torch}: what it says of time and "
            "memory may be off",
            stacklevel=2,
        )


def check_model(plan: PlanRecord, module: nn.Module, captured: str, settings: Settings) -> None:
    """Raise PlanError if `plan` was made for another model, other inputs or another mode.

    `captured` is the text of the graph as captured now, for the mode and device of `settings`. Ops may differ if the
    devices do.
    """
    found = list(_mode(plan.settings, settings))
    parameters = {name: _type(tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()}
    found += _differences("parameter", parameters, _types(plan.parameters))
    if plan.settings.training and settings.training:
        both = {name: one for name, one in module.named_parameters() if name in plan.parameters}
        found += _trained(both, _gradients(captured), _gradients(plan.graph("CAPTURED")))
    found += _differences("input", _inputs(captured), _inputs(plan.graph("CAPTURED")))
    if not found and settings.device == plan.settings.device:
        found = list(_program(structure(captured), structure(plan.graph("CAPTURED"))))
    _refuse(found, "Make a plan for this model and these inputs")


def _refuse(found: list[str], advice: str) -> None:
    if not found:
        return
    folded = fold_text(found)
    more = [f"and {len(folded) - SHOWN} more"] if len(folded) > SHOWN else []
    differences = "; ".join([*folded[:SHOWN], *more])
    raise PlanError(f"the plan does not fit: {differences}. {advice}", differences=differences)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _mode(plan: Settings, now: Settings) -> Iterator[str]:
    if plan.training != now.training:
        modes = {True: "with gradients", False: "without gradients"}
        yield f"the call is {modes[now.training]}, the plan for one {modes[plan.training]}"


def _types(values: Mapping[str, Value]) -> dict[str, str]:
    return {name: _type(value.shape, value.dtype) for name, value in values.items()}


def _type(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype.removeprefix('torch.')}{list(shape)}"


def _inputs(graph: str) -> dict[str, str]:
    lines = (re.match(r'%\w+: (\w+\[[\d, ]*\]).* = input\("(.*?)"\)', line) for line in graph.splitlines())
    return {match[2]: match[1] for match in lines if match}


def _gradients(graph: str) -> frozenset[str]:
    return frozenset(re.findall(r'\bgradient\("(.*?)"\)', graph))


def _trained(parameters: Mapping[str, nn.Parameter], now: frozenset[str], plan: frozenset[str]) -> Iterator[str]:
    """Yield the parameters that have a gradient in one of the programs, as requires_grad says."""
    for name, parameter in parameters.items():
        if name in now ^ plan and parameter.requires_grad == (name in now):
            yield f"parameter {name!r} has requires_grad={parameter.requires_grad}, the plan's {name in plan}"


def _differences(what: str, now: Mapping[str, str], plan: Mapping[str, str]) -> list[str]:
    other = [f"{what} {n!r} is {t}, the plan's {plan[n]}" for n, t in now.items() if n in plan and plan[n] != t]
    new = [f"{what} {name!r} is not in the plan" for name in now if name not in plan]
    return other + new + [f"the plan has {what} {name!r}, which is not there" for name in plan if name not in now]


def _program(now: list[str], plan: list[str]) -> Iterator[str]:
    """Yield the first call that differs in more than the names of values, or else the first whose names differ."""
    lines = list(zip_longest(now, plan, fillvalue="nothing more"))
    other = list(zip_longest(_by_order(now), _by_order(plan), fillvalue="nothing more"))
    differing = [number for number, (mine, theirs) in enumerate(other) if mine != theirs]
    differing = differing or [number for number, (mine, theirs) in enumerate(lines) if mine != theirs]
    for mine, theirs in (lines[number] for number in differing[:1]):
        yield f"the model computes {mine.strip()} where the plan has {theirs.strip()}"


def _by_order(lines: Iterable[str]) -> list[str]:
    """Return the lines with each value named by the order in which it appears."""
    names: dict[str, str] = {}
    return [re.sub(r"%\w+", lambda name: names.setdefault(name[0], f"%{len(names)}"), line) for line in lines]
