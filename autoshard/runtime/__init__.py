"""Run a plan on process groups: a sharded module with DTensor parameters and a program per mode."""
