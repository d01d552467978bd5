"""One interface to models of every framework: torch, JAX, layers, and users' own models."""
