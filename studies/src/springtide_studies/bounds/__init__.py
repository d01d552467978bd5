"""Bounds that results are measured against."""
