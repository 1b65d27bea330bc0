"""Read what a user gives: options, constraints, recipes by axis, the mesh and its hardware."""
