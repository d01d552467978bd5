"""Machines made of models with seeded faults, and the invariants that every policy must keep on them."""
