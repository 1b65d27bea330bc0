"""Try on a GPU all that was never run on one: `python -m benchmarks.gpu_check` (`make gpu-check`) writes a report."""
