"""Solvers of the model: lower bounds by relaxation, assignments by mixed-integer programs."""
