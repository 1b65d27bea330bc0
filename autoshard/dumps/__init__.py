"""Write graphs to a folder after each pass, with a header from which they can be replayed."""
