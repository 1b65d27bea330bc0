"""Correct what DTensor does with checkpoints, views, data and numbers, once a module is sharded."""
