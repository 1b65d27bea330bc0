"""Local forms of rules that are more than one call."""
