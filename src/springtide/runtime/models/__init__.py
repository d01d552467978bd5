"""A model behind one interface whatever its framework: torch, JAX, layers, models that users bring."""
