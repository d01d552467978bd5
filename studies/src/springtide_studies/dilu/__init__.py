"""Dilu's packing, co-scaling and collocation."""
