"""Search for the layouts of a whole graph at once: the shortest predicted step that fits the memory.

The problem. An op has strategies: a row of its sharding rule per mesh axis, which give its operands and results their
layouts. A strategy costs seconds of computation and bytes of memory. Where one op makes a value in another layout than
its user needs, a reshard (here: a transition) costs seconds on a link. One strategy per op is an assignment, and the best
one is wanted. That is MAP inference on a factor graph: ops are variables, strategies their labels, strategies have unary
costs and transitions pairwise costs. To keep it small, ops between which no reshard pays are one variable, and so are
the same ops of equal layers. Two things couple all variables: a segment of the step (a layer's forward or backward) lasts
as long as the longest of computation, links inside a node, links across nodes, and the critical path, as these overlap; and
all bytes together have to fit the memory budget.

The bound. Weights for the resources of each segment and a price per byte (Lagrange multipliers) turn the objective
into a sum of unary and pairwise costs that is at most the step. The minimum of that sum is bounded from below by
sequential tree-reweighted message passing (TRW-S): messages along the factors move cost to the variables until what
every variable has to pay adds up; this is a dual ascent. Good multipliers make the bound high. They are the duals of
the linear program of the strategies whose costs are near the bound.

The assignment. Rounding the messages, variable by variable, gives assignments; the best that fits is the incumbent. The
messages also give each strategy a reduced cost: how far over the bound all assignments with it are. A strategy over the
incumbent is pruned (reduced-cost fixing), and HiGHS solves the mixed-integer program (MIP) of a restriction: of the
strategies near the bound at first, then of more, until it holds all that can be better than the incumbent. That proves
the optimum; where that program is too large, the bound of the last one solved stands. Bound and incumbent give the gap
that is reported.

In reading order:

1. `optimize` drives the search; `search_state` holds its bound and incumbent, `goal` what it looks for.
2. `model.factor_graph` defines variables, values and segments; `model.objective` the terms that each adds to the step.
3. The bound: `solvers.relaxation` applies `solvers.multipliers` to the objective; `solvers.dual_ascent` bounds it by
   messages in `solvers.transition_factors`, along `solvers.adjacency`. `tune_multipliers` finds the multipliers.
4. Assignments: `solvers.dual_rounding` reads them off the messages, `solvers.evaluate` costs one; `solvers.restriction`
   chooses strategies, `solvers.mip` states their program, `solvers.highs` solves it.
5. The factor graph of a program: `model.tied_layers` and `model.step_structure` read the graph, `model.strategies`
   enumerates what nodes may do, `model.grouping` and `model.axis_groups` reduce that; `model.variables` and
   `model.value_edges` make a `model.skeleton` without costs.
6. Costs: `model.node_costs` and `model.node_bytes` of strategies, `model.reshard_routes`, `model.unit_costs` and
   `model.transitions` of reshards, `model.local_sizes` of one rank's parts, `model.memory_budget` of bytes over the limit,
   with what `recomputation_savings` expects of `selective_recomputation`.
7. The way in and out: `prepared` keeps all of this for the next goal, `solution` names the layouts found, and
   `alternatives` prices what was not chosen.
"""
