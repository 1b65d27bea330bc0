"""Predict what one training step takes on a machine: seconds, exposed communication, and memory.

A step is simulated as a `Program`: tasks (kernels, collectives, the optimizer's updates) in the order in which the host
issues them, and the buffers that they read and write. The device has one compute stream and one stream per link (inside
a node, across nodes); each stream runs its tasks one at a time, in issue order. A kernel takes the seconds of a roofline,
a collective those of the fastest algorithm on its links. A task that reads a collective's result waits for it; a
collective starts once the kernels issued before it have ended. A kernel and a collective that run at the same time slow
each other down (contention). Memory is the sum of the buffers that are live at each turn. Communication is exposed while
a link is busy and the compute stream is idle: an interval union, not a sum.

Reading order:

1. What is simulated: `program`, `contention`, `liveness`, `simulate`.
2. What one task takes: `kernel_time`, `collective_time`, `pipelined_matmul_time`.
3. From a graph to a program: `fused_regions`, `graph_buffers`, `graph_kernels`, `kernel_tasks`, `optimizer_step`,
   `build_program`; `program_memo` keeps the last one. `unroll` repeats the layers of a folded graph,
   `forward_backward` splits a step into its phases.
4. In which order it runs, in `scheduling/`: `movable_tasks`, `list_scheduling`, `bucketing`, `best_schedule`;
   `exposed_bound` says how good any order could be.
5. What the backward computes again: `saved_values`.
"""
