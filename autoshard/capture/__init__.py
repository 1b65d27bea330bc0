"""Capture a module and its arguments as one ATen graph of forward and backward, with the signature of the call."""
