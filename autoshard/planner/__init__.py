"""Choose a plan for a captured model: candidates by search and by recipe, each simulated, and the best is taken.

In reading order:

1. `make_plan` drives it: a `request` becomes a `problem` (graph, mesh with hardware, options), the problem a plan.
   `decision` says by which way: the recipe that is asked for, an earlier plan, or a search.
2. `candidates` compares the solver's plan (`solver_candidate`) with the experts' (`recipe_candidates`) in `standings`;
   `effort` limits how much is tried, and `shrink` repeats with less memory what the simulator finds too large.
   `paddings` has all of this done for each way to pad dims and the batch.
3. `evaluation` makes and simulates the program of one candidate; `recomputation` chooses what its backward recomputes,
   `chunking` predicts which products are sent in chunks, `prediction` derives the costs that the plan reports.
4. `state` keeps all of this for questions about the plan.
"""
