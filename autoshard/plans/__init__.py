"""The plan as data: its record, its file, and the models that it is compatible with."""
