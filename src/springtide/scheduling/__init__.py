"""Scheduling decisions: the registry of policies, what they are made of, and the parts that they share."""
