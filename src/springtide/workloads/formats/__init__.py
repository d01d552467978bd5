"""Readers of published traces, one format each."""
