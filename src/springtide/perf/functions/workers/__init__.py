"""Models of functions that hold the whole model, at every memory size, and their correction by measurements."""
