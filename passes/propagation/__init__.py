"""The parts of `propagate`: the placements so far, and the decisions on one axis."""
