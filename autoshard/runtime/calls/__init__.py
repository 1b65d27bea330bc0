"""The calls of a sharded module: one program per kind of call, over one set of parameters."""
