"""Solve the model: bounds from below by relaxation, assignments from above by programs, proofs by probing."""
