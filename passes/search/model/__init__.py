"""The model of the search: the factor graph of a program, and the objective with all its costs."""
