"""The table of models that autoshard is tried on, made by `python -m benchmarks.models`."""
