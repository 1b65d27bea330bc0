"""The use of Inductor: its settings, passes, decompositions and compilation."""
