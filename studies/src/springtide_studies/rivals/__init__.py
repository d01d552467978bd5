"""Policies and solvers of other systems, for comparison."""
