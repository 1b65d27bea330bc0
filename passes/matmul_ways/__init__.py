"""Choose how collectives beside matrix products run: whole, in chunks, or as one operator with the products."""
