"""All replacements of parts of torch, and the functions that limit them to a block or apply them once.

For a block of code, in the thread that runs it (`replaced`); other threads use torch's own:

| what | while | why | where |
|---|---|---|---|
| `distributed_c10d._process_group_name` | a group is made | ranks name a group by its members, not by a count | groups.py |
| `GraphModule.recompile` | a graph is partitioned | no code is generated that nobody calls | graphs.py |
| `partitioners.has_recomputable_rng_ops` | a graph is partitioned | attention without dropout is not random | partition.py |
| `partitioners.fx_graph_cse` | a graph is partitioned | torch's imports Inductor's compiler | partition.py |
| `networkx.minimum_cut` | a graph is partitioned | its default algorithm is slow | partition.py |
| `effects.has_effects` | forward and backward are traced | checks of factorizations thread tokens through a graph | joint.py |
| `torch._C._get_mkldnn_enabled` | forward and backward are traced | oneDNN's LSTM cannot be sharded | joint.py |
| `ConstantFolder.node_to_last_non_output_use` | constants are folded | torch's is the slowest part | inductor/compilation.py |
| `SchedulerNode.recompute_size_and_body` (2.13) | a graph is compiled | reads follow writes | inductor/corrections |
| `CppKernelProxy.aggregate_reduction_buffers` | a graph is compiled | tails have fewer results | inductor/corrections |
| `CppTile2DKernel.store` (2.13) | a graph is compiled | places of scatters are theirs | inductor/corrections |
| `LoopBody.get_read_expr`, | a graph is compiled | small buffers | inductor/corrections |
| `OuterLoopFusedSchedulerNode.` | | in fused loops suffice | |
| `check_outer_fusion_loop_level_attr` (2.13) | | | |
| `CppVecKernel.arange` | a graph is compiled | steps have 64 bits | inductor/corrections |
| the check of Inductor's pattern for sums of constants | a graph is compiled | sums have a type | inductor/corrections |
| `UniformValueConstantFolder._add_peephole_patterns` | constants are folded | 0 times NaN is NaN | inductor/corrections |
| `_make_reduction_inner` of Inductor's lowering | a graph is compiled | indices count in order | inductor/corrections |
| `PatternMatcherPass.apply` | patterns are matched | false matches are left out | inductor/inductor_patterns.py |
| `IgnoredFunctionVariable.call_function` and | a call is traced | what the model prints is left out | dynamo/module_trace.py |
| `LoggingLoggerVariable.call_method` | | | |
| `symbolic_convert._detect_and_normalize_assert_statement` | a call is traced | checks are left out | dynamo/module_trace.py |
| `SetAttrBuiltinVariable._call_setattr` and | a call is traced | a value is no leaf | dynamo/module_trace.py |
| `TensorVariable.call_method` | | functions of dynamo/substitutes.py are methods, too | |
| `SubgraphTracer.create_proxy` | a call is traced | selections by equal masks have one length | dynamo/equal_masks.py |
| `VariableBuilder._wrap` and | a call is traced | numpy's numbers are numbers, | dynamo/numpy_numbers.py |
| `TorchInGraphFunctionVariable.call_function` | | with a dtype of their own | |
| `TensorVariable.var_getattr` | a call is traced | a view that is returned is in the graph | dynamo/module_trace.py |
| `call_random_fn` | a call is traced | it tells of Python's random numbers | dynamo/module_trace.py |
| `ConstDictVariable.getitem_const_raise_exception_if_absent`, | a call is traced | what code looks for | dynamo/absences.py |
| `GetAttrBuiltinVariable._call_getattr`, | | has guards | |
| `HasAttrBuiltinVariable.call_function`, | | | |
| `CommonListMethodsVariable.call_method`, | | | |
| `InstructionTranslatorBase.load_builtin_from_argval`, | | | |
| `symbolic_convert.is_stdlib`, `generic_getattr` (2.14) | | | |
| `warnings.showwarning` | a call is traced | dynamo reports side effects in a warning only | dynamo/side_effects.py |
| `logging.Logger.callHandlers` | a call is run to compare it with a graph | it logs nothing | patches.py |
| `nn.Module.__call__` | a call is run instead of traced by dynamo | ops are told their modules | direct_trace.py |
| `transformer._detect_is_causal_mask` | a call is run instead of traced by dynamo | it asks for values | direct_trace.py |

For the rest of the process, once (`once`):

| what | from when | where it applies | where |
|---|---|---|---|
| `_c10d_functional.all_gather_into_tensor` on CPU | groups on gloo are opened | torch 2.13 and newer | groups.py |
| Inductor's lowering of `autoshard.send`, which has none | a graph is compiled | `autoshard.send` | inductor/compilation.py |
| dynamo's polyfill of `checkpoint_sequential` | a call is traced | dynamo, which has none | dynamo/substitutes.py |
| dynamo's polyfills of `ctc_loss`, `cudnn.flags` and `METHODS` | a call is traced | dynamo | dynamo/substitutes.py |
| dynamo's polyfill of `flex_attention` | a call is traced | dynamo | dynamo/substitutes.py |
| dynamo's polyfill of `transformer._detect_is_causal_mask` | a call is traced | dynamo | dynamo/substitutes.py |
| dynamo's rules for `constraints.is_dependent` and `gaussian_nll_loss` | each call is traced | dynamo | dynamo/substitutes.py |
| the formulas that `kl_divergence` looks up in its first call | a call is traced | distributions | dynamo/substitutes.py |
| `DTensor`'s three hooks for checkpoints | a sharded module is made | parts of several boxes | dtensor_hooks/checkpoints.py |
| DTensor's rule for views | a sharded module is made | views that torch gets wrong | dtensor_hooks/dtensor_views.py |
| `OpDispatcher._dispatch_fast_path_python_tail` | a sharded module is made | changes of copies | dtensor_hooks/dtensor_views.py |
| DTensor's handler of `fill_` | a sharded module is made | `weight[0] = 0`, which has none | dtensor_hooks/dtensor_views.py |
| `DTensor.data` | a sharded module is made | `parameter.data = tensor`, which is ignored | dtensor_hooks/values.py |
| `OpDispatcher._dispatch_get_local_results_slow_path` | a sharded module is made | random ops on CPU | dtensor_hooks/values.py |
| DTensor's handler of `eye` | a sharded module is made | `nn.init.eye_` | dtensor_hooks/dtensor_views.py |
| DTensor's handlers of sums, scans and losses | a sharded module is made | parts are mixed up | dtensor_hooks/wrong_rules.py |
| DTensor's handlers of `any`, `view(dtype)` | a sharded module is made | parts are pending | dtensor_hooks/pending_parts.py |
| DTensor's rule for `threshold` | a sharded module is made | maxima are pending | dtensor_hooks/pending_parts.py |
| `_math_ops._infer_reduction_dims` | a sharded module is made | no dims are all | dtensor_hooks/pending_parts.py |
| rules of `fill_`, `zero_` (2.14) | a sharded module is made | norms can be filled | dtensor_hooks/pending_parts.py |
| DTensor's handlers of convolutions | a sharded module is made | weights have parts | dtensor_hooks/whole_weights.py |
| DTensor's handlers of `rrelu_with_noise` | a sharded module is made | random ops on CPU | dtensor_hooks/values.py |
| `Partial._reduce_value` | a sharded module is made | maxima keep NaN | dtensor_hooks/wrong_rules.py |
| DTensor's handlers of maxima and norms | a sharded module is made | a rank has no elements | dtensor_hooks/empty_parts.py |
| DTensor's handler of `_local_scalar_dense`, `DTensor.__format__` | groups are opened | `item()` | dtensor_hooks/values.py |
| `runtime_wrappers.HANDLED_TYPES` | a sharded module is made | compiled code of a `WholeTensor` | dynamo/plain_subclasses.py |

Inductor's settings are set for each compilation (inductor/inductor_settings.py), never for the process.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Replacement:
    """The original function, and by thread its replacements, the innermost last."""

    original: Any
    by_thread: dict[int, list[Callable[..., Any]]] = field(default_factory=dict)

    def chosen(self) -> Callable[..., Any]:
        stack = self.by_thread.get(threading.get_ident())
        function: Callable[..., Any] = stack[-1] if stack else self.original
        return function


_LOCK = threading.Lock()
_REPLACED: dict[tuple[int, str], _Replacement] = {}  # by owner and name
_DONE: set[str] = set()  # names of the patches that `once` ran


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace the function `owner.name` in this thread until the block ends."""
    key, thread = (id(owner), name), threading.get_ident()
    with _LOCK:
        if key not in _REPLACED:
            _REPLACED[key] = _Replacement(vars(owner)[name])
            setattr(owner, name, _dispatcher(_REPLACED[key]))
        replacement = _REPLACED[key]
        replacement.by_thread.setdefault(thread, []).append(function)
    try:
        yield
    finally:
        with _LOCK:
            replacement.by_thread[thread].pop()
            if not replacement.by_thread[thread]:
                del replacement.by_thread[thread]
            if not replacement.by_thread:
                setattr(owner, name, replacement.original)
                del _REPLACED[key]


def _dispatcher(replacement: _Replacement) -> Callable[..., Any]:
    @functools.wraps(replacement.original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return replacement.chosen()(*args, **kwargs)

    return dispatch


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Let loggers write nothing in this thread, at levels that stay as they are."""
    with replaced(logging.Logger, "callHandlers", lambda logger, record: None):
        yield


def once(name: str, patch: Callable[[], None]) -> None:
    """Run `patch`, unless one of that name already ran in this process."""
    with _LOCK:
        if name not in _DONE:
            patch()
            _DONE.add(name)
