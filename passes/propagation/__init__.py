"""The parts of `propagate`: what is decided so far, and how one axis decides."""
