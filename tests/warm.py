"""Do once what each rank would do first, in the process that ranks are forked from: import this module there.

A first plan fills caches of torch and of ours. Inductor builds its patterns at its first graph, and finds out which vectors the
CPU has by compiling and loading libraries, each in a process that imports torch.

Of a build for an accelerator, such as PyPI's for Linux, a plan starts autograd's threads of its devices, also where there are
none. A process that is forked after that can have no backward, so each rank plans by itself there.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard import Mesh, Options, plan
from passes._torch.deferred import run_joint_graph_passes

if torch.accelerator.current_accelerator() is None:
    plan(nn.Linear(4, 4), Mesh("dp=2"), (torch.ones(2, 4),), options=Options(recipe="fsdp"))
run_joint_graph_passes(make_fx(torch.relu, tracing_mode="fake")(torch.ones(2)))
pick_vec_isa()
