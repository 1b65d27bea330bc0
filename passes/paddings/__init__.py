"""Padding of a graph before it is placed: which dims are padded, and the calls on padded values."""
