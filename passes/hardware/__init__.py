"""Describe machines by figures: `hardware.py` has the record and its file, `presets/` the machines that are known."""
