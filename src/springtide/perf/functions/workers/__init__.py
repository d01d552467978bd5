"""A function with the whole model at every memory size, and what measurements teach about it."""
