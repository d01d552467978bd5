"""Solvers of other systems."""
