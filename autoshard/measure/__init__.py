"""Measure a machine, and answer questions that the cost formulas decide: crossovers and hybrid sharding."""
