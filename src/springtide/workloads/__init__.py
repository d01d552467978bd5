"""Traces of jobs: one form for all, readers of published formats, scaling tables, draws of missing fields."""
