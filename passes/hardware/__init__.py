"""Figures of machines: `hardware.py` has the record and its file, `presets/` the known machines."""
