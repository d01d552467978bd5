"""Measuring speed: steps, layers, collectives, resizes and shares, each in workers of their own."""
