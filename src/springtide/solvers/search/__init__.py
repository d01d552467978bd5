"""Searches by trials: Gaussian processes, bisection, the search for a goal."""
