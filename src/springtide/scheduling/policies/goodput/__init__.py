"""Shares, placements and batch sizes that train most per second, at a cost per change."""
