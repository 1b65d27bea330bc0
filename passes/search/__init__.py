"""Search for the layouts of a whole graph at once: the shortest predicted step that fits the memory.

The search is MAP inference on a factor graph. Its variables are the nodes of the graph, or groups of nodes between which
no reshard pays, tied over equal layers; the labels of a variable are strategies, a row of the op's rule per mesh axis.
Unary costs are the seconds and bytes of a strategy; pairwise costs are transitions, the reshards between the layout that
one variable makes and the layout that another needs. The objective couples them: a segment of the step (a layer's
forward or backward) lasts as long as the busiest of computation, links inside a node and links across, and all bytes
together have to fit the memory budget. Lagrange multipliers for segments and bytes make it a sum of unary and pairwise
costs, whose lower bound sequential tree-reweighted message passing (TRW-S, a dual ascent) finds; rounding its messages
gives assignments. Good multipliers are the duals of a linear program: of the assignments seen so far (Kelley's cutting
planes) while none fits, then of the strategies near the bound. Reduced-cost fixing prunes strategies that no assignment
near the bound has, and HiGHS solves the mixed-integer program of the rest; the restriction is widened until it holds all
that is better than the incumbent, which proves the optimum. Where that program is too large, probing (strengthened by
branching) proves that nothing is shorter by 1 %. Bound and incumbent give the gap that is reported.

In reading order:

1. `optimize` drives the search in five steps; `search_state` holds its bound and incumbent, `goal` what it looks for.
2. `model.factor_graph` defines variables, values and segments; `model.objective` the terms that each adds to the step.
3. The bound: `solvers.relaxation` weighs the objective by `solvers.multipliers`; `solvers.dual_ascent` bounds it by
   messages in `solvers.transition_factors`. `tune_multipliers` and `solvers.cutting_planes` find the multipliers.
4. Assignments: `solvers.evaluate` costs one, `solvers.mip` states the program of a restriction, `solvers.highs` solves
   it, `solvers.probing` proves.
5. The factor graph of a program: `model.tied_layers` and `model.step_structure` read the graph, `model.strategies`
   enumerates what nodes may do, `model.grouping` and `model.axis_groups` reduce that; `model.variables` and
   `model.value_edges` make a `model.skeleton` without costs.
6. Costs: `model.node_costs` of strategies, `model.unit_costs` and `model.transitions` of reshards,
   `model.memory_budget` of bytes over the limit, with what `recomputation_savings` expects of `selective_recomputation`.
7. The way in and out: `prepared` keeps all of this for the next goal, `solution` names the layouts found, `recipe_costs`
   evaluates a recipe, and `alternatives` prices what was not chosen.
"""
