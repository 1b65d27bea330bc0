"""From a module and arguments to a plan and a per-device program; no process group."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import GraphModule, Node

from autoshard.capture import Captured, capture
from autoshard.constraints import check_options, insisted, recipes_of
from autoshard.fit import check_model
from autoshard.options import Options
from autoshard.pipeline import default_pipeline
from autoshard.plan import ShardingPlan
from autoshard.progress import Progress, silent
from autoshard.settings import Settings, settings_of
from passes.base import Observer, Pass, PassContext
from passes.cast_parameters import CastParameters
from passes.errors import InputError
from passes.ir.graph import InputRole, OutputRole, Stage, input_of, outputs_of, placeholders, returned, tensor_of
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.plan import collectives_of, inputs_of, layouts_by_name, results_by_name
from passes.ir.text import format_graph
from passes.manager import PassManager
from passes.observers import Dumper, Timer, Verifier
from passes.recipes.data import DATA_RECIPES
from passes.seed import Insisted, Seed


@dataclass(frozen=True)
class Planned:
    """A plan, the captured border of the model, and the per-device program. `seconds` is time by phase."""

    plan: ShardingPlan
    captured: Captured
    graph: GraphModule
    seconds: Mapping[str, float]


def make_plan(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    options: Options,
    *,
    training: bool = True,
    stored: Mapping[str, Layout] | None = None,
    device: str = "cpu",
    plan: ShardingPlan | None = None,
    progress: Progress = silent,
) -> Planned:
    """Capture one call on global arguments, and run the pipeline on it.

    `stored` are layouts of parameters that an earlier program of the same module settled; `plan` is one to follow.
    `progress` is told each
    phase as it begins.
    Raises UserErrors for a model, mesh or options that cannot work.
    """
    check_options(options, mesh)
    recipes = recipes_of(options.recipe, mesh)
    timer, recorder = Timer(), _Recorder()
    started = time.perf_counter()
    policy = options.mixed_precision or MixedPrecisionPolicy()
    progress("capture")
    captured = capture(
        module,
        args,
        dict(kwargs),
        training=training,
        device=device,
        compute_dtype=policy.param_dtype,
        cast_inputs=policy.cast_forward_inputs,
    )
    gm = captured.graph_module
    seconds = {"capture": time.perf_counter() - started}
    ctx = PassContext(mesh, unknown_ops=options.unknown_ops)
    text = format_graph(gm, mesh)
    settings = settings_of(options, training=training, device=device)
    if plan is not None:
        check_model(plan, module, text, settings)
    _check_batch(gm, mesh, recipes)
    seed = _seed(gm, captured, mesh, options, recipes, stored)
    pipeline = options.pipeline or default_pipeline(bucket_bytes=options.bucket_bytes)
    passes = _configured(pipeline, seed, _cast(module, args, kwargs, captured, options))
    observers: tuple[Observer, ...] = (timer, Verifier(), recorder, *_dumpers(options))
    progress("passes")
    PassManager(passes, observers).run(gm, ctx)
    return Planned(recorder.plan(ctx, recipes, text, settings), captured, gm, seconds | timer.seconds)


def _configured(passes: tuple[Pass, ...], seed: Seed, cast: CastParameters) -> tuple[Pass, ...]:
    """A pipeline with what options say filled in, where a pass was left as it is by default."""
    fill: dict[Pass, Pass] = {Seed(): seed, CastParameters(): cast}
    return tuple(fill.get(one, one) if isinstance(one, Seed | CastParameters) else one for one in passes)


def _seed(
    gm: GraphModule,
    captured: Captured,
    mesh: Mesh,
    options: Options,
    recipes: tuple[str | None, ...],
    stored: Mapping[str, Layout] | None,
) -> Seed:
    parameters = {input_of(n).name: tensor_of(n).shape for n in placeholders(gm.graph, InputRole.PARAMETER)}
    names = parameters | {alias: parameters[name] for alias, name in captured.tied.items()}
    params = insisted(options.params, "params", names, mesh)
    inputs = {input_of(n).name: tensor_of(n).shape for n in placeholders(gm.graph, InputRole.INPUT)}
    outputs = {
        output.name: tensor_of(value).shape
        for value, output in zip(returned(gm.graph), outputs_of(gm.graph), strict=True)
        if output.role is OutputRole.OUTPUT and isinstance(value, Node)
    }
    if not options.reshard_after_forward:
        recipes = tuple("zero2" if recipe == "fsdp" else recipe for recipe in recipes)
    return Seed(
        recipes,
        tuple(Insisted(captured.tied.get(one.name, one.name), one.axis, one.placement) for one in params),
        insisted(options.inputs, "inputs", inputs, mesh),
        insisted(options.outputs, "outputs", outputs, mesh),
        tuple((stored or {}).items()),
    )


def _check_batch(gm: GraphModule, mesh: Mesh, recipes: tuple[str | None, ...]) -> None:
    axes = [axis for axis, recipe in enumerate(recipes) if recipe in DATA_RECIPES]
    ways = math.prod(mesh.sizes[axis] for axis in axes)
    first = next((n for n in placeholders(gm.graph, InputRole.INPUT) if tensor_of(n).dim() > 0), None)
    if first is not None and tensor_of(first).shape[0] % ways:
        names = " x ".join(mesh.names[axis] for axis in axes)
        raise InputError(
            f"input {input_of(first).name!r} has a batch of {tensor_of(first).shape[0]}, which {names} = {ways} does "
            f"not divide; give a batch that is a multiple of {ways}"
        )


def _cast(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], captured: Captured, options: Options
) -> CastParameters:
    policy = options.mixed_precision
    if policy is None:
        return CastParameters()
    stored = tuple((name, p.dtype) for name, p in module.named_parameters() if p.is_floating_point())
    given = captured.signature.flatten(args, dict(kwargs))
    inputs = tuple(
        (spec.path, tensor.dtype)
        for spec, tensor in zip(captured.signature.inputs, given, strict=True)
        if tensor.is_floating_point()
    )
    return CastParameters(stored, inputs, policy.reduce_dtype, policy.output_dtype)


def _dumpers(options: Options) -> tuple[Observer, ...]:
    folder = options.dump or os.environ.get("AUTOSHARD_DUMP")
    if not folder or (dist.is_initialized() and dist.get_rank() != 0):
        return ()
    return (Dumper(Path(folder)),)


@dataclass
class _Recorder(Observer):
    """Reads the plan off the graph while shapes are global, and keeps the text of the last stages."""

    graphs: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def before(self, pass_: Pass, gm: GraphModule, ctx: PassContext) -> None:
        """Nothing to read yet."""

    def after(self, pass_: Pass, gm: GraphModule, ctx: PassContext, changed: bool) -> None:
        self.graphs[pass_.gives.name] = format_graph(gm, ctx.mesh)
        if pass_.gives is Stage.COLLECTIVE:
            self.facts = {
                "parameters": inputs_of(gm, InputRole.PARAMETER),
                "inputs": inputs_of(gm, InputRole.INPUT),
                "outputs": results_by_name(gm, OutputRole.OUTPUT),
                "layouts": layouts_by_name(gm),
                "collectives": collectives_of(gm, ctx.mesh),
            }

    def plan(self, ctx: PassContext, recipes: tuple[str | None, ...], captured: str, settings: Settings) -> ShardingPlan:
        remarks = tuple(dict.fromkeys(ctx.remarks))
        graphs = self.graphs | {"CAPTURED": captured}
        return ShardingPlan(
            mesh=ctx.mesh, recipes=recipes, remarks=remarks, graphs=graphs, settings=settings, **self.facts
        )
