"""Traces and surfaces that only studies read."""
