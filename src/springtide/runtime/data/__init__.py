"""Which samples a step uses, and where they are read from."""
