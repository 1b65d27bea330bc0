"""Selections of rows by a mask, `x[mask]`, in shapes that are known before the model runs."""
