"""The only module that imports private parts of torch; one function per borrowed thing.

Supported: torch 2.11 to the newest release; developed on the version that constraints.txt pins.
"""

from __future__ import annotations

import heapq
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._dynamo.exc import UserError as DynamoUserError
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import TempLocalSource
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor import inductor_prims
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._logging._internal import trace_log, trace_structured_artifact
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    in_kernel_invocation_manager,
)
from torch._subclasses.fake_tensor import (
    FakeTensorMode as FakeTensorMode,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as DPlacement
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.fx.node import map_arg
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
    _get_node_type,
    tree_flatten,
    tree_unflatten,
)
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils.checkpoint import CheckpointPolicy

# Process groups -------------------------------------------------------------------------------------------------


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let functional collectives find `group` under `name`."""
    _register_process_group(name, group)  # type: ignore[arg-type]


def unregister_group(name: str) -> None:
    _unregister_process_group(name)  # type: ignore[arg-type]


def is_group_registered(name: str) -> bool:
    try:
        _resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return False
    return True


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long an operation of `group` may take."""
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    return backend.options._timeout


# DTensor --------------------------------------------------------------------------------------------------------


def strided_shard(dim: int, factor: int) -> DPlacement:
    """DTensor's shard of a digit: each of `factor` blocks of the dim is sharded by itself."""
    return _StridedShard(dim, split_factor=factor)


def shard_of(placement: DPlacement) -> tuple[int, int] | None:
    """Dim and number of blocks of a shard, 1 block for a contiguous one; None for what is no shard."""
    if isinstance(placement, _StridedShard):
        return placement.dim, int(placement.split_factor)
    return (placement.dim, 1) if isinstance(placement, DShard) else None


def dtensor_spec(
    device_mesh: DeviceMesh, placements: tuple[DPlacement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Where a contiguous tensor of global `shape` lives."""
    stride = torch.empty(shape, device="meta").stride()
    # A shard of blocks can also say that another axis comes first; DTensor must be told where it does not.
    is_order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, device_mesh) is not None
    return DTensorSpec(
        device_mesh,
        placements,
        TensorMeta(torch.Size(shape), stride, dtype),
        use_strided_shard_as_shard_order=None if is_order else False,
    )


def dtensor_of_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around this rank's part, without communication, checks or autograd."""
    # Without __init__, which does nothing and costs as much as the rest: once per gradient and step.
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def local_of_dtensor(tensor: DTensor) -> torch.Tensor:
    return tensor._local_tensor


def relay_dtensor(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Give the same object another part and placements; optimizers that hold it keep working."""
    tensor._local_tensor = local
    tensor._spec = spec


@dataclass(frozen=True)
class Box:
    """A box of a global tensor, and where it stands in a rank's part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


def teach_checkpoints(boxes_of: Callable[[DTensor], Sequence[Box] | None]) -> None:
    """Let `torch.distributed.checkpoint` save and load DTensors whose local part is several boxes.

    torch takes every local part for one box, and would write one of blocks (a sharded fused projection, say) to
    wrong places without a word. There is no hook that reaches the state of an optimizer, so DTensor's own are
    replaced; a tensor for which `boxes_of` gives None goes the way it always went.
    """
    if DTensor.__create_write_items__.__module__ == __name__:
        return
    write_items: Any = DTensor.__create_write_items__
    chunk_list: Any = DTensor.__create_chunk_list__
    shard_at: Any = DTensor.__get_tensor_shard__

    def create_write_items(self: DTensor, fqn: str, object: Any) -> Any:
        boxes = boxes_of(self)
        if boxes is None:
            return write_items(self, fqn, object)
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, self.size()),
            )
            for box in boxes
        ]

    def create_chunk_list(self: DTensor) -> Any:
        boxes = boxes_of(self)
        return chunk_list(self) if boxes is None else [_chunk(box) for box in boxes]

    def get_tensor_shard(self: DTensor, index: Any) -> torch.Tensor:
        boxes = boxes_of(self)
        if boxes is None:
            whole: torch.Tensor = shard_at(self, index)
            return whole
        box = next(box for box in boxes if torch.Size(box.offsets) == index.offset)
        part = self.to_local()
        for dim, (start, length) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    DTensor.__create_write_items__ = create_write_items  # type: ignore[method-assign]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[method-assign]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


# Partition and Inductor -----------------------------------------------------------------------------------------

_REGION = 0  # one for all that is tagged, as the partitioner saves what a higher region reads


def checkpoint_of(node: Node) -> tuple[int, bool] | None:
    """The number of the `torch.utils.checkpoint` call that a captured node is of, and whether its policy keeps the value."""
    if "recompute" not in node.meta or "ac_graph_id" not in node.meta:
        return None
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return int(node.meta["ac_graph_id"]), node.meta["recompute"] not in again


def clear_checkpoint(node: Node) -> None:
    """Take away what `checkpoint_of` reads, so that the partitioner does not."""
    del node.meta["recompute"], node.meta["ac_graph_id"]


def tag_recompute(node: Node) -> None:
    """Keep the partitioner from saving `node` for the backward: it is computed there again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _REGION


def tag_save(node: Node) -> None:
    """Make the partitioner save `node` for the backward, if it is needed there."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def min_cut_partition(
    joint: GraphModule, *, num_forward_outputs: int, static_inputs: Sequence[int]
) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a joint graph with placeholders `primals_*` and `tangents_*`."""
    with lazy_code(), mock.patch.object(partitioners, "has_recomputable_rng_ops", _draws_again):
        forward, backward = min_cut_rematerialization_partition(
            joint,
            None,
            num_fwd_outputs=num_forward_outputs,
            static_lifetime_input_indices=list(static_inputs),
        )
    return forward, backward


def _draws_again(joint: GraphModule) -> bool:
    """Whether the partitioner is to keep generators' states: attention counts as random for it, with dropout or without."""
    return False


def run_joint_graph_passes(gm: GraphModule) -> None:
    """What Inductor does to a graph before it is partitioned: constant folding, attention patterns, no-ops."""
    with _compiling([node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]):
        joint_graph_passes(gm)


@contextmanager
def _compiling(inputs: Sequence[Any]) -> Iterator[None]:
    fake_mode = detect_fake_mode(inputs)
    if fake_mode is not None and fake_mode.shape_env is None:
        fake_mode.shape_env = ShapeEnv()  # Inductor's cache asks for one, though shapes are static
    with (
        V.set_fake_mode(fake_mode),
        tracing(TracingContext(fake_mode)),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        enable_python_dispatcher(),
    ):
        yield


class _GraphOrder(CustomSchedulerPass):
    """Put kernels, collectives and waits in the order of the graph, a joined kernel where the last of its calls stood.

    Without it a kernel stands where the first of its calls stood, and what the last one waits for in front of it; and
    where a value's readers make it again, its kernel stands with the first reader.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        makers = {name: number for number, node in enumerate(nodes) for name in node.get_buffer_names()}
        readers: list[list[int]] = [[] for _ in nodes]
        missing = [0] * len(nodes)
        for number, node in enumerate(nodes):
            sources = {makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers} - {number}
            missing[number] = len(sources)
            for source in sources:
                readers[source].append(number)
        places: dict[Node, int] = {}
        keys = [_place(node, places) for node in nodes]
        ready = [(keys[number], number) for number, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        found: list[Any] = []
        while ready:
            _, number = heapq.heappop(ready)
            found.append(nodes[number])
            for reader in readers[number]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (keys[reader], reader))
        assert len(found) == len(nodes), "Inductor's nodes wait for each other"
        return found

    def uuid(self) -> str:
        return "autoshard: the order of the graph, 1"


def _place(scheduled: Any, places: dict[Node, int]) -> int:
    """Where the last call that a node of Inductor's scheduler runs stands in its graph; 0 where it runs none."""
    origins = [origin for part in scheduled.get_nodes() for origin in part.node.get_origins()]
    for graph in {origin.graph for origin in origins if origin not in places}:
        places |= {node: number for number, node in enumerate(graph.nodes)}
    return max((places.get(origin, 0) for origin in origins), default=0)


# Everything in Inductor that moves, merges or splits collectives and waits, off, and the graph's order behind what joins
# kernels. Not every release has each.
_KEEP_ORDER: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "dedup_reduce_scatters": False,
    "_post_fusion_custom_pass": _GraphOrder(),
}


@dataclass(frozen=True)
class InductorCode:
    """A compiled graph: a list of tensors, which it empties, to a sequence of tensors."""

    run: Callable[[list[torch.Tensor]], Sequence[Any]]
    output_strides: tuple[tuple[int, ...] | None, ...]  # as the code returns them; None or () where as in the graph


def inductor_compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    static_inputs: Sequence[int],
    visible_outputs: Sequence[int],
    is_backward: bool,
    is_inference: bool,
    keep_order: bool,
) -> InductorCode:
    """Compile a flat ATen graph on fake `inputs`.

    `visible_outputs` keep the strides that the graph says. With `keep_order`, collectives and waits stay
    where the graph has them: by default Inductor moves each wait behind its collective.
    """
    options: dict[str, Any] = {"fx_graph_cache": True}
    if keep_order:
        options |= {key: value for key, value in _KEEP_ORDER.items() if key in inductor_config.get_config_copy()}
    gm.graph.output_node().meta["user_visible_output_idxs"] = list(visible_outputs)
    with (
        _compiling(inputs),
        inductor_config.patch(options),
        TracingContext.report_output_strides() as strides,
    ):
        code = compile_fx_inner(
            gm, inputs, static_input_idxs=list(static_inputs), is_backward=is_backward, is_inference=is_inference
        )
    return InductorCode(code, tuple(_plain(stride) for stride in strides or ()))


def _plain(stride: Sequence[Any] | None) -> tuple[int, ...] | None:
    return None if stride is None else tuple(int(step) for step in stride)


def box(gm: GraphModule) -> GraphModule:
    """Let `gm` take its inputs as one list, which it empties: an input can die before the graph ends."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return gm


# Capture -------------------------------------------------------------------------------------------------------------


def select_decompositions(*, whole: frozenset[OpOverload]) -> dict[Any, Any]:
    """Inductor's decompositions, without those of `whole`."""
    return {op: rule for op, rule in select_decomp_table().items() if op not in whole}


def low_memory_max_pool() -> tuple[OpOverload, OpOverload]:
    """Inductor's max pooling, which keeps an int8 offset per window, and its conversion to indices."""
    return inductor_prims._low_memory_max_pool_with_offsets, inductor_prims._low_memory_max_pool_offsets_to_indices


def fake_mode() -> Any:
    """A mode in which tensors have no data; static shapes only. A context manager."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def flatten_pytree(tree: Any) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Leaves of `tree` with their paths (`"batch.labels"`, `"0"`, `""` for a bare leaf), and its structure."""
    leaves, spec = tree_flatten(tree)
    return list(zip(_leaf_paths(tree, ""), leaves, strict=True)), spec


def _leaf_paths(tree: Any, path: str) -> Iterator[str]:
    node = SUPPORTED_NODES.get(_get_node_type(tree))
    if node is None:
        yield path
        return
    children, context = node.flatten_fn(tree)
    names = [str(number) for number in range(len(children))]
    if node.flatten_with_keys_fn is not None:
        names = [_key_name(key) for key, _ in node.flatten_with_keys_fn(tree)[0]]
    elif isinstance(context, list | tuple) and len(context) == len(children):
        names = [str(name) for name in context]  # a dict-like class registered without names: Hugging Face's outputs
    for name, child in zip(names, children, strict=True):
        yield from _leaf_paths(child, f"{path}.{name}" if path else name)


def _key_name(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return str(key.idx)
    if isinstance(key, MappingKey):
        return str(key.key)
    if isinstance(key, GetAttrKey):
        return key.name
    return str(key).strip("[].'")


def unflatten_pytree(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    return tree_unflatten(list(leaves), spec)


@dataclass(frozen=True)
class SideEffect:
    """A Python object that a traced call changed: where the call got it from, and the stack of a change.

    `constants` are the attributes that it was given, by name, where they are constants and there is no other change.
    """

    source: str
    stack: str
    changed: Any = field(compare=False)
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class TracedModule:
    """A call of a module as dynamo saw it: no Python, no structure, every tensor it reads a placeholder.

    `inputs` are the tensors of the placeholders (the very objects of module and arguments), `sources` where the
    call got them from; `rebuild` turns values of the graph's outputs into what the module returns.
    """

    graph_module: GraphModule
    inputs: tuple[Any, ...]
    sources: tuple[str, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    side_effects: tuple[SideEffect, ...]


def trace_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule:
    """Trace a call with dynamo: static shapes, numbers as constants. Raises what `trace_failure` reads."""
    config = torch._dynamo.config.patch(
        allow_rnn=True,
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        specialize_float=True,
        specialize_int=True,
        ignore_logging_functions=_logging_functions(),
    )
    with config, _side_effects() as effects:
        traced: Any = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    given = (*args, *kwargs.values())
    inputs = tuple(traced._dynamo_bytecode_flatten(*given))
    captured = traced._dynamo_bytecode_flatten.out.graph_capture_output.output_graph.export_metadata
    sources = tuple(_source_name(captured.graph_input_idx_to_local_source[number]) for number in range(len(inputs)))
    return TracedModule(
        traced, inputs, sources, lambda outputs: traced._dynamo_bytecode_unflatten(outputs, given), tuple(effects)
    )


def _logging_functions() -> set[Callable[..., Any]]:
    """What writes to a log, methods that libraries add to loggers included: no part of a program of tensors."""
    loggers = (logging.getLogger(), *(logging.getLogger(name) for name in sorted(logging.root.manager.loggerDict)))
    kinds = dict.fromkeys(kind for logger in loggers for kind in type(logger).__mro__[:-1])
    methods = (value for kind in kinds for name, value in vars(kind).items() if not name.startswith("_"))
    return {method for method in methods if callable(method)}


def _source_name(source: Any) -> str:
    return str(source.name() if callable(source.name) else source.name)


_SIDE_EFFECTS = "While compiling, we found certain side effects"  # how dynamo's warning begins


def _is_restored(variable: Any, stored: dict[str, Any] | None) -> bool:
    """Whether all attributes that a call sets are constants that they were before: a flag set and reset."""
    if not stored or "value" not in vars(variable):
        return False
    held = vars(variable.value) if "__dict__" in dir(variable.value) else {}
    return all(
        name in held and new.is_python_constant() and new.as_python_constant() is held[name]
        for name, new in stored.items()
    )


@contextmanager
def _side_effects() -> Iterator[list[SideEffect]]:
    """Collect the changes of Python objects that dynamo warns of when it traces for export.

    The warning names the objects only; the lines are read from the tracer, which is on the stack then.
    """
    effects: list[SideEffect] = []

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        if not str(message).startswith(_SIDE_EFFECTS):
            report(message, *place, **more)
            return
        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), OutputGraph):
            assert frame.f_back is not None
            frame = frame.f_back
        tracked = frame.f_locals["self"].side_effects
        for variable in tracked._get_modified_vars():
            if _is_restored(variable, tracked.store_attr_mutations.get(variable)):
                continue
            stacks = tracked.mutation_user_stacks.get(variable, ())
            if variable.source is None or isinstance(variable.source, TempLocalSource):
                continue
            if isinstance(variable, TorchFunctionModeStackVariable):
                continue  # contexts of the call itself, such as torch.no_grad
            stored = tracked.store_attr_mutations.get(variable) or {}
            constants = {name: new.as_python_constant() for name, new in stored.items() if new.is_python_constant()}
            effects.append(
                SideEffect(
                    _source_name(variable.source),
                    "".join(stacks[0].format()) if stacks else "",
                    vars(variable).get("value"),
                    constants if len(constants) == len(stored) else {},
                )
            )

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_SIDE_EFFECTS)
        report, warnings.showwarning = warnings.showwarning, show
        yield effects


@dataclass(frozen=True)
class TraceFailure:
    """Why a trace failed: torch's name for the reason, its words, and the stack of the user's code."""

    kind: str
    detail: str
    stack: str


def trace_failure(error: Exception) -> TraceFailure:
    """What an exception of `trace_module` or `trace_joint` says."""
    detail = str(error)
    if isinstance(error, Unsupported | TorchRuntimeError | DynamoUserError):
        kind = error.gb_type if isinstance(error, Unsupported) else type(error).__name__
        return TraceFailure(kind or "", detail, "".join(error.real_stack.format()))
    kind = type(error).__name__
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        detail = str(error.func).rpartition(".")[0]
    return TraceFailure(kind, detail, str(error))


@dataclass(frozen=True)
class JointGraph:
    """A functional ATen graph of forward and backward, and what its ends are.

    An end is (kind, index). Inputs: `("input", i)`, then `("tangent", i)` of output i, or `("mutation", i)`
    for the tangent of input i's new value. Outputs: `("mutation", i)`, `("output", i)`, `("gradient", i)`
    of input i, in the order of the graph; None for an input without gradient.
    """

    graph_module: GraphModule
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int] | None, ...]


def lazy_code() -> AbstractContextManager[None]:
    """Graph modules that torch makes inside write their Python code when they are called first, if ever."""
    return _use_lazy_graph_module(True)


def module_of(graph: Graph, root: torch.nn.Module) -> GraphModule:
    """A graph module that writes its Python code when it is called first, if ever: it takes as long as a pass."""
    return _LazyGraphModule(root, graph)


def trace_joint(flat: GraphModule, args: tuple[torch.Tensor, ...], decompositions: dict[Any, Any]) -> JointGraph:
    """Forward and backward of `flat`; the forward alone where no output needs a gradient."""
    with ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, flat, args, decompositions=decompositions)
        graph_module = joint.graph_module
    descriptions = graph_module.graph.output_node().meta["desc"]
    inputs = tuple(_input_end(node.meta["desc"]) for node in graph_module.graph.find_nodes(op="placeholder"))
    return JointGraph(graph_module, inputs, tuple(_output_end(description) for description in descriptions))


def _input_end(description: Any) -> tuple[str, int]:
    if isinstance(description, PlainAOTInput):
        return ("input", description.idx)
    assert isinstance(description, TangentAOTInput), description
    end = _output_end(description.output)
    assert end is not None
    return ("tangent", end[1]) if end[0] == "output" else end


def _output_end(description: Any) -> tuple[str, int] | None:
    if description is None:
        return None
    if isinstance(description, PlainAOTOutput):
        return ("output", description.idx)
    if isinstance(description, GradAOTOutput):
        return ("gradient", _input_end(description.grad_of)[1])
    assert isinstance(description, InputMutationAOTOutput), description
    return ("mutation", _input_end(description.mutated_input)[1])


# Graphs as text -------------------------------------------------------------------------------------------------


def trace_artifact(name: str, text: str) -> None:
    """Add `text` to PyTorch's structured trace (TORCH_TRACE), where `tlparse` shows it."""
    trace_structured_artifact(name, "string", lambda: text)


def is_traced() -> bool:
    """Whether anybody reads PyTorch's structured trace; known once it was written to, as a capture does."""
    return bool(trace_log.handlers)


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """The fake mode that fake tensors were made in; a new one where there are none."""
    return detect_fake_mode(list(values)) or FakeTensorMode(allow_non_fake_inputs=True)


def fake_empty(
    mode: FakeTensorMode,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    """A fake tensor, contiguous without `stride`, made without a call that the mode would look into."""
    if stride is None:
        return FakeTensor(mode, torch.empty(tuple(shape), dtype=dtype, device="meta"), device)
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def fake_view(
    mode: FakeTensorMode, base: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A fake tensor on the memory of fake tensor `base`, made without a call that the mode would look into."""
    with in_kernel_invocation_manager(mode):
        view = base.as_strided(shape, stride, offset)
    return FakeTensor(mode, view, base.device)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def trace_call(
    target: Any, args: Any, kwargs: Any, values: dict[Node, torch.Tensor], decomposition_table: dict[Any, Any]
) -> GraphModule:
    """One call as the graph that it decomposes to; `values` are the fake tensors of its operands, by node."""
    nodes = list(values)

    def call(*tensors: torch.Tensor) -> Any:
        held = dict(zip(nodes, tensors, strict=True))
        positional, named = map_arg((args, kwargs), held.__getitem__)
        return target(*positional, **named)

    made: GraphModule = make_fx(call, decomposition_table=decomposition_table)(*values.values())
    return made
