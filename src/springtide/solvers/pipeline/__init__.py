"""The partition of a model over functions: exact search, bounds and checks."""
