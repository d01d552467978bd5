"""Workloads that share a device: packing, limits, and what other policies see of the rest."""
