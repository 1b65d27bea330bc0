"""Expert plans as placements of parameters and pins of values; they know graphs, not models."""
