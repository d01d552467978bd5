"""Searches over numbers: no platform, no clock, no devices by name; what goes in decides what comes out."""
