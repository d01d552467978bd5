"""Policies of other systems, each in the registry where the studies are installed."""
