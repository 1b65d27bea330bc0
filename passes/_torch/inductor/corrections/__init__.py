"""Corrections of what Inductor gets wrong on CPUs: one file for each fault."""
