"""Plan a model with its dims and its batch padded in several ways, and take the best."""
