"""The only package that imports private parts of torch: one module per subsystem, one function per borrowed feature.

Supported: torch 2.13 and newer, tested up to 2.14 (`supported`); developed on the version that constraints.txt pins. `patches`
lists what is replaced in torch; `deferred` imports what is slow to import, at its first call.
"""

from __future__ import annotations

from passes._torch.inductor.inductor_config import check_source
from passes._torch.supported import check_release, unsupported

check_release()
check_source()
try:
    from passes._torch.called_functions import CalledFunction, called_functions, name_of
    from passes._torch.deferred import (
        alike_as_now,
        allow_in_compiled_code,
        assign_data,
        correct_wrong_rules,
        draw_whole,
        inductor_compile,
        min_cut_partition,
        read_numbers,
        reduce_empty_parts,
        refuse_wrong_views,
        run_joint_graph_passes,
        select_decompositions,
        teach_checkpoints,
        trace_failure,
        trace_joint,
        trace_module,
        unchanged_since_now,
        write_to_parts,
    )
    from passes._torch.direct_trace import WatchedOps, current_stack, one_call_graph, run_directly
    from passes._torch.dtensor import (
        Box,
        DTensorSpec,
        dtensor_of_local,
        dtensor_spec,
        is_on_every_rank,
        local_of_dtensor,
        relay_dtensor,
        required_gradients,
        shard_of,
        strided_shard,
    )
    from passes._torch.fake import (
        FakeTensorMode,
        as_traced,
        clear_caches,
        fake_empty,
        fake_mode,
        fake_mode_of,
        fake_view,
        is_fake,
        is_known,
        memory_of,
        quiet_fakes,
        rehearsed,
        shares_memory,
    )
    from passes._torch.graphs import OpOverload, box, lazy_code, module_of, trace_call
    from passes._torch.groups import (
        during_timeout,
        group_timeout,
        mend_gathers,
        new_group,
        register_group,
        registered_group,
        store_address,
        unregister_group,
        watch_store,
    )
    from passes._torch.interception import Calls, intercepted
    from passes._torch.modes import (
        in_backward,
        in_forward_mode,
        in_transform,
        is_batched,
        keeps_graph,
        reentrant_checkpoint,
        without_autocast,
        without_fused_encoders,
        without_saved_tensors_hooks,
        without_torch_function,
    )
    from passes._torch.operators.aligned import (
        ALIGNED_CONVOLUTION,
        ALIGNED_CONVOLUTION_INPUT,
        ALIGNED_CONVOLUTION_WEIGHT,
    )
    from passes._torch.operators.ctc import CTC_LOSS, MASKED_SELECT
    from passes._torch.operators.neighbours import SEND
    from passes._torch.operators.reversed_cumsum import REVERSED_CUMSUM
    from passes._torch.operators.symmetric import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, reserve_symmetric_memory
    from passes._torch.patches import quiet_loggers
    from passes._torch.pytree import TreeSpec, containers_of, flatten_pytree, map_pytree, unflatten_pytree
    from passes._torch.recompute_tags import checkpoint_of, clear_checkpoint, tag_recompute, tag_save
    from passes._torch.results import (
        OUTSIDE_GONE,
        InductorCode,
        JointGraph,
        Keys,
        LeftOut,
        OutsideRead,
        SideEffect,
        TracedModule,
        TraceFailure,
        followed,
        names_read,
    )
    from passes._torch.structured_trace import is_traced, trace_artifact
except (ImportError, AttributeError) as error:
    raise unsupported(error) from error

__all__ = [
    "ALIGNED_CONVOLUTION",
    "ALIGNED_CONVOLUTION_INPUT",
    "ALIGNED_CONVOLUTION_WEIGHT",
    "ALL_GATHER_MATMUL",
    "Box",
    "CTC_LOSS",
    "MASKED_SELECT",
    "CalledFunction",
    "Calls",
    "DTensorSpec",
    "FakeTensorMode",
    "InductorCode",
    "JointGraph",
    "Keys",
    "LeftOut",
    "MATMUL_REDUCE_SCATTER",
    "OUTSIDE_GONE",
    "OpOverload",
    "OutsideRead",
    "REVERSED_CUMSUM",
    "SEND",
    "SideEffect",
    "TraceFailure",
    "TracedModule",
    "TreeSpec",
    "WatchedOps",
    "alike_as_now",
    "containers_of",
    "allow_in_compiled_code",
    "assign_data",
    "correct_wrong_rules",
    "draw_whole",
    "as_traced",
    "box",
    "called_functions",
    "clear_caches",
    "name_of",
    "names_read",
    "checkpoint_of",
    "clear_checkpoint",
    "current_stack",
    "dtensor_of_local",
    "dtensor_spec",
    "during_timeout",
    "fake_empty",
    "fake_mode",
    "fake_mode_of",
    "fake_view",
    "flatten_pytree",
    "followed",
    "group_timeout",
    "in_backward",
    "in_forward_mode",
    "in_transform",
    "is_batched",
    "inductor_compile",
    "intercepted",
    "is_fake",
    "is_known",
    "is_traced",
    "keeps_graph",
    "lazy_code",
    "is_on_every_rank",
    "local_of_dtensor",
    "map_pytree",
    "memory_of",
    "mend_gathers",
    "min_cut_partition",
    "module_of",
    "new_group",
    "one_call_graph",
    "register_group",
    "reentrant_checkpoint",
    "registered_group",
    "quiet_fakes",
    "quiet_loggers",
    "read_numbers",
    "reduce_empty_parts",
    "refuse_wrong_views",
    "rehearsed",
    "relay_dtensor",
    "required_gradients",
    "reserve_symmetric_memory",
    "run_directly",
    "run_joint_graph_passes",
    "select_decompositions",
    "shard_of",
    "shares_memory",
    "store_address",
    "strided_shard",
    "tag_recompute",
    "tag_save",
    "teach_checkpoints",
    "trace_artifact",
    "trace_call",
    "trace_failure",
    "trace_joint",
    "trace_module",
    "unchanged_since_now",
    "unflatten_pytree",
    "unregister_group",
    "watch_store",
    "without_autocast",
    "without_fused_encoders",
    "without_saved_tensors_hooks",
    "without_torch_function",
    "write_to_parts",
]
