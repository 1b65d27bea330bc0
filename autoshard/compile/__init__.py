"""Compile the program of one rank: partition it, overlap its communication, and hand it to Inductor."""
