"""Choose the order in which a program's tasks are issued, and which of its collectives share a message."""
