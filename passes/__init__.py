"""The compiler: passes that rewrite the ATen graph of one device into the program of one rank.

A pass is a file here (`base` says what one is), takes a graph at one stage (`ir/graph/stages.py`) and gives it at the same
or the next; `manager` runs them, `verify` checks each result, `observers` dump, time and log. The order is in
`autoshard/phases.py`. A pass's docstring ends in a graph before and after it.

    prepare          normalize (with normal_forms/), pad (with paddings/), fold
    place            seed, cast_parameters; propagate (with propagation/) by rules, or solve (with search/) by cost
    lower            insert_reshards, fuse_collectives, cancel_reshards, lower_reshards, localize, decompose
    rematerialize    rematerialize
    overlap          decompose_matmuls, bucket_collectives, schedule_overlap

What they share: `ir/` has meshes, layouts, graphs, collectives and the text form; `rules/` how each op can be sharded;
`recipes/` the experts' plans; `cost/` predicts a step on a machine of `hardware/`. `errors` has all exceptions; `_torch/`
alone imports private parts of PyTorch.
"""
